#!/bin/sh
# run_mpi.sh BIN N...: tests/mpi under BIN/mpiexec at each number of ranks N.
# Rank 0 prints; the other ranks write to .pytest-ranks/, shown when the run fails.
set -eu
export bin=$1
shift
logs=.pytest-ranks
export logs

for ranks in "$@"; do
    rm -rf "$logs"
    mkdir "$logs"
    echo "tests/mpi at $ranks ranks"
    "$bin/mpiexec" -n "$ranks" sh -c '
        rank=${PMI_RANK:-${OMPI_COMM_WORLD_RANK:?}}
        if [ "$rank" != 0 ]; then exec >"$logs/$rank" 2>&1; fi
        exec "$bin/python" -m pytest --with-mpi -p no:cacheprovider tests/mpi
    ' || {
        status=$?
        for log in "$logs"/*; do
            tail -n 1 "$log" | grep -q "^=* [0-9]* passed" || { echo "rank ${log##*/}:"; cat "$log"; }
        done
        exit "$status"
    }
done
