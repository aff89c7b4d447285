"""The command line of COMET: parses, calls comet_core, prints. Importing it costs no torch."""
