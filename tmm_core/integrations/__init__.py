"""Integrations with other libraries. Users import them; ``import tmm_core`` does not."""
