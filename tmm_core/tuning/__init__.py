"""Which candidate is the fastest."""
