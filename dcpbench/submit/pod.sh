# What each pod runs: it waits until all of them are there, and is the node of its index. Node 0 stays until its run was fetched.
rank=${JOB_COMPLETION_INDEX:-0}
folder=$RUN_FOLDER
mkdir -p "$folder"
if [ "$NODES" -gt 1 ]; then
    node=0
    while [ "$node" -lt "$NODES" ]; do
        said=
        until [ "$node" -eq "$rank" ] || getent hosts "$JOB-$node.$JOB" > /dev/null; do
            [ -n "$said" ] || echo "waiting until the pod of node $node runs"
            said=yes
            sleep 2
        done
        node=$((node + 1))
    done
    address=$JOB-0.$JOB
    if [ "$rank" -gt 0 ]; then
        folder=$folder/nodes/$rank
    else
        address=$POD_IP
        case $address in *:*) address="[$address]" ;; esac
    fi
    set -- "$@" --nodes "$NODES,rank=$rank,endpoint=$address:$PORT"
fi
if [ "$rank" -gt 0 ]; then exec "$@" -o "$folder"; fi
"$@" -o "$folder" &
pid=$!
trap 'kill -TERM "$pid" 2> /dev/null' TERM INT
while :; do
    wait "$pid"
    code=$?
    kill -0 "$pid" 2> /dev/null || break # a signal ends the waiting, not the command
done
if [ "$FETCH_S" -gt 0 ]; then
    trap 'exit "$code"' TERM INT
    echo "$ENDED $code"
    waited=0
    while [ ! -e "$FETCHED" ] && [ "$waited" -lt "$FETCH_S" ]; do
        sleep 1
        waited=$((waited + 1))
    done
fi
exit "$code"
