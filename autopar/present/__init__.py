"""How a Plan reads: tables of text. No torch here."""
