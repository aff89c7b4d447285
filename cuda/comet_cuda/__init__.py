"""Number formats, reference ops and kernels of COMET. Imports nothing from comet_core or comet_cli."""
