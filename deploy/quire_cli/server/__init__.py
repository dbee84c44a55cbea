"""One tritonserver from start to end, for `quire serve`.

tritonserver      where one is installed, and whether this Python can run a backend in it
launch            its backend directory, environment and flags; model_config checks its models' configurations
run_directory     what a run owns, and what dead runs have left; private_memory
supervisor        start, wait until ready, serve, start again, drain
server_process    the process; server_log, its output
server_watch      its true state while it serves; loaded_models, host_pressure
companion         what runs beside it
health            GET /health, which answers in every state
workarounds       what single releases need besides
"""
