#!/bin/sh
# run_mpi.sh BIN N...: tests/mpi under BIN/mpiexec at each number of ranks N, side by side: ranks wait for each other
# more than they compute. What rank 0 of each run prints comes in the order given; the output of the launcher and of the
# other ranks is in .pytest-ranks/ and is shown when the run fails.
set -eu
export bin=$1
shift
top=.pytest-ranks
rm -rf "$top"

launchers=
trap 'kill $launchers; exit 130' INT TERM
for ranks in "$@"; do
    export logs="$top/$ranks"
    mkdir -p "$logs"
    "$bin/mpiexec" -n "$ranks" sh -c '
        rank=${PMI_RANK:-${OMPI_COMM_WORLD_RANK:?}}
        exec "$bin/python" -m pytest --with-mpi -p no:cacheprovider tests/mpi >"$logs/$rank" 2>&1
    ' >"$logs/launcher" 2>&1 &
    launchers="$launchers $!"
done

failed=0
for launcher in $launchers; do
    ranks=$1
    shift
    status=0
    wait "$launcher" || status=$?
    echo "tests/mpi at $ranks ranks"
    if [ "$status" = 0 ]; then
        cat "$top/$ranks/0"
    else
        failed=$status
        for log in "$top/$ranks"/*; do
            tail -n 1 "$log" | grep -q "^=* [0-9]* passed" || { echo "${log##*/} of $ranks ranks:"; cat "$log"; }
        done
    fi
done
exit "$failed"
