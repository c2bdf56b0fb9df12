# Functions of the torchrun scripts; to be sourced, not run.
# shellcheck shell=bash

# torchrun_options: sets STOP_SIGNAL, which makes the ranks save and stop, and TORCHRUN_OPTIONS.
torchrun_options() {
    # Without these torchrun would not pass SIGUSR1 on (older ones cannot; then SIGTERM has to do), and would kill a
    # rank that saves for longer than 30 seconds.
    local help
    help=$("$PYTHON" -m torch.distributed.run --help)
    STOP_SIGNAL=TERM
    TORCHRUN_OPTIONS=()
    case $help in
        *--signals-to-handle*)
            STOP_SIGNAL=USR1
            TORCHRUN_OPTIONS+=("--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
            ;;
    esac
    case $help in *--shutdown-timeout*) TORCHRUN_OPTIONS+=("--shutdown-timeout=${SAVE_SECONDS:-120}") ;; esac
}
