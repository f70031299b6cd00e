"""The `jaxpar` command: one file per sub-command."""
