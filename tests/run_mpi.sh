#!/bin/sh
# run_mpi.sh BIN N...: tests/mpi under BIN/mpiexec at each number of ranks N, the first beside the others, which go one
# after the other: ranks wait for each other more than they compute. What rank 0 of each run prints comes in the order
# given; the output of the launcher and of the other ranks is in .pytest-ranks/ and is shown when the run fails.
set -eu
export bin=$1
shift
top=.pytest-ranks
rm -rf "$top"

run() {
    export logs="$top/$1"
    mkdir -p "$logs"
    "$bin/mpiexec" -n "$1" sh -c '
        rank=${PMI_RANK:-${OMPI_COMM_WORLD_RANK:?}}
        exec "$bin/python" -m pytest --with-mpi -p no:cacheprovider tests/mpi >"$logs/$rank" 2>&1
    ' >"$logs/launcher" 2>&1 &
    launcher=$!
    trap 'kill $launcher; exit 130' INT TERM
    status=0
    wait $launcher || status=$?
    echo $status >"$top/$1.status"
}

first=$1
lanes=
trap 'kill $lanes; exit 130' INT TERM
(run "$first") &
lanes=$!
(for ranks in "$@"; do [ "$ranks" = "$first" ] || run "$ranks"; done) &
lanes="$lanes $!"
wait

failed=0
for ranks in "$@"; do
    echo "tests/mpi at $ranks ranks"
    status=$(cat "$top/$ranks.status")
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
