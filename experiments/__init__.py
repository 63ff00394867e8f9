"""Runs of purepost, one file each: a frozen Config and main(config)."""
