"""What does this machine achieve: curves of ops, collectives and links, and corrections from real runs."""
