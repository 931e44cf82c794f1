"""The nouns: frozen records that flow from room to room. Nothing here imports torch or another room."""
