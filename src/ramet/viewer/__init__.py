"""Looking at a run: one page that needs no network. Only the command line imports this package."""
