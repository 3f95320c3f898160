#!/bin/sh
# run_mpi.sh BIN N...: tests/mpi under BIN/mpiexec at each number of ranks N, side by side: ranks wait for each other
# more than they compute. What each run prints comes in the order given; the output of ranks other than the first is in
# .pytest-ranks/ and is shown when the run fails.
set -eu
export bin=$1
shift
top=.pytest-ranks
rm -rf "$top"

for ranks in "$@"; do
    export logs="$top/$ranks"
    mkdir -p "$logs"
    {
        status=0
        "$bin/mpiexec" -n "$ranks" sh -c '
            rank=${PMI_RANK:-${OMPI_COMM_WORLD_RANK:?}}
            exec >"$logs/$rank" 2>&1 "$bin/python" -m pytest --with-mpi -p no:cacheprovider tests/mpi
        ' >"$logs/mpiexec" 2>&1 || status=$?
        echo "$status" >"$logs/status"
    } &
done
wait

failed=0
for ranks in "$@"; do
    logs="$top/$ranks"
    echo "tests/mpi at $ranks ranks"
    cat "$logs/0"
    status=$(cat "$logs/status")
    if [ "$status" != 0 ]; then
        failed=$status
        cat "$logs/mpiexec"
        for log in "$logs"/[1-9]*; do
            tail -n 1 "$log" | grep -q "^=* [0-9]* passed" || { echo "rank ${log##*/} of $ranks:"; cat "$log"; }
        done
    fi
done
exit "$failed"
