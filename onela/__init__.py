"""OneLA."""
