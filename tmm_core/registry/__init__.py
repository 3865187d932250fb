"""Plugins: loading, isolation and queries."""
