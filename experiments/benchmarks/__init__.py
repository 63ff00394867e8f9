"""How fast purepost is, and beside its peers."""
