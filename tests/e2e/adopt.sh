# A disk moves to another node, which has a home of its own: the pool is adopted there, and its
# PersistentVolumes follow it.
# shellcheck shell=bash

MOVED=/var/lib/slackwater/moved # its path on node 1
moved_disk() { echo "$(dirname "$(node_disk 1)")/moved.img"; }
driver_of() { # NODE COMMAND...: in the driver's container there
    local pod
    pod=$(kubectl -n $SYSTEM get pods -l app.kubernetes.io/component=node --field-selector "spec.nodeName=$1" -o name)
    kubectl -n $SYSTEM exec "$pod" -c driver -- slackwater "${@:2}"
}
router() { kubectl -n $SYSTEM exec deploy/slackwater-controller -c router -- slackwater "$@"; } # COMMAND...
homes() { kubectl get pv -o 'jsonpath={.items[*].spec.nodeAffinity.required.nodeSelectorTerms[0].matchExpressions[0].values[0]}' | tr ' ' '\n' | sort -u; }
pv_of() { get "pvc/$1" .spec.volumeName; } # CLAIM
pools_of_chart() { # NAME=PATH...: as a flag for helm
    local one list=
    for one; do list+="{\"name\":\"${one%%=*}\",\"path\":\"${one#*=}\",\"init\":true,\"image\":\"\",\"overcommit\":1},"; done
    printf 'pools=[%s]' "${list%,}"
}
chart_of() { # upgrade|rollback WORD...
    local workload
    helm "$1" slackwater "${@:2}" --namespace $SYSTEM >/dev/null
    for workload in $(kubectl -n $SYSTEM get daemonset,deployment -o name); do
        kubectl -n $SYSTEM rollout status --timeout="$WAIT" "$workload" >/dev/null
    done
}
label_of() { kubectl get node "$1" -o "jsonpath={.metadata.labels['topology\.csi\.slackwater\.dev/home']}"; }

# Restores the original state: one pool for each node.
moved_back() { # POOL
    local n other
    chart_of rollback || :
    node_exec 1 umount -l $MOVED || :
    node_exec 1 rmdir $MOVED || :
    rm -f "$(moved_disk)"
    node_exec 2 rm -rf $MOVED || :
    driver_of "$NODE_1" pool forget "$1" || :
    driver_of "$NODE_2" pool forget moved || :
    other=$(kubectl get pools -o 'jsonpath={.items[?(@.status.name=="moved")].metadata.name}')
    for n in $1 $other; do kubectl delete pool "$n" --ignore-not-found >/dev/null || :; done
}

test_a_pool_is_adopted_by_another_node() {
    two_nodes
    local pool old new volume uid output left
    claim data 100Mi
    claim other 64Mi
    claim spare 64Mi
    pod writer -n "$NODE_2" data:/v other:/o spare:/s
    ready pod/writer
    inside writer 'echo precious > /v/file; echo too > /o/file; sync'
    snapshot before data
    gone pod/writer
    pool=$(pool_id 2)
    old=$(label_of "$NODE_2") new=$(label_of "$NODE_1")
    volume=$(pv_of data) uid=$(get pvc/data .metadata.uid)

    # The disk is moved from node 2 to node 1, and node 2 gets another one.
    trap 'moved_back '"$pool" EXIT
    node_stop 2
    mv "$(node_disk 2)" "$(moved_disk)"
    node_exec 1 mkdir -p $MOVED
    node_exec 1 mount -o loop "$(moved_disk)" $MOVED
    node_start 2
    kubectl wait --for=condition=Ready --timeout="$WAIT" "node/$NODE_2" >/dev/null
    chart_of upgrade "$E2E/../../deploy/chart" --reset-then-reuse-values --set-json "$(pools_of_chart default=/var/lib/slackwater/pool moved=$MOVED)"
    eventually 120 shown_in_vain "$pool"
    note "before it is adopted: $(kubectl get pool "$pool" -o 'jsonpath={.status.health}: {.status.message}')"
    output=$(router pool adopt "$pool" --cluster 2>&1) && fail "it is not adopted yet: $output" && return 1
    note "the command's answer: $output"

    # Node 2 misses it and has not forgotten it, so an administrator names node 1.
    request_pool "$pool" adopt "$NODE_2"
    eventually 60 has_condition "$pool" Adopted NotPresent
    note "of the wrong node: $(condition_of "$pool" Adopted)"
    request_pool "$pool" adopt "$NODE_1"
    eventually 120 request_is_done "$pool" adopt
    eventually 120 waits_for_volumes "$pool"
    note "adopted by the node: $(kubectl get pool "$pool" -o 'jsonpath={.status.node}, {.status.health}: {.status.message}')"
    # A pod is still scheduled to the old home, where its volume is not. While it exists, nothing is moved.
    pod early data:/v
    eventually 60 is_there early "$NODE_2"
    output=$(router pool adopt "$pool" --cluster | grep "$NS/data")
    has "its volume" "$output" "skip:"
    gone pod/early
    eventually 120 detached "$volume"

    output=$(router pool adopt "$pool" --cluster)
    has "what is to be done" "$output" "nothing was changed"
    has "what is to be done" "$output" "$NS/data"
    is "homes of all volumes" "$(homes)" "$old"
    router pool adopt "$pool" --cluster --yes
    is "homes of all volumes" "$(homes)" "$new"
    is "the claim's volume" "$(pv_of data)" "$volume"
    is "the claim" "$(get pvc/data '.status.phase')/$(get pvc/data .metadata.uid)" "Bound/$uid"
    is "its policy" "$(kubectl get pv "$volume" -o 'jsonpath={.spec.persistentVolumeReclaimPolicy}')" Delete
    pod reader data:/v
    ready pod/reader
    is "its node" "$(node_of reader)" "$NODE_1"
    is "the file" "$(inside reader 'cat /v/file')" precious
    eventually 90 healthy "$pool"

    # Snapshots have moved with it, and new ones can be created.
    snapshot after data
    claim restored 100Mi slackwater VolumeSnapshot/before
    pod restored restored:/v other:/o
    ready pod/restored
    is "the restore of before" "$(inside restored 'cat /v/file; cat /o/file' | tr '\n' ' ')" "precious too "
    # Node 2 gets a pool of its own again, once an administrator has declared that the old one will not return.
    request_pool "$pool" forget "$NODE_2"
    eventually 120 request_is_done "$pool" forget
    claim there 64Mi
    pod there -n "$NODE_2" there:/v
    ready pod/there
    is "the pool is where it was" "$(kubectl get pool "$pool" -o 'jsonpath={.status.node} {.status.health}')" "$NODE_1 Healthy"
    gone pod/reader pod/restored pod/there
    k delete volumesnapshot --all --wait --timeout="$WAIT" >/dev/null
    gone pvc/data pvc/other pvc/spare pvc/restored pvc/there
    eventually 120 no_objects
    left=$(node_exec 1 sh -c "cd $MOVED && find volumes snapshots -mindepth 1")
    is "what is left on the disk" "$left" ""
}
request_pool() { kubectl patch pool "$1" --type merge -p "{\"spec\":{\"$2\":\"$3\"}}" >/dev/null; } # POOL adopt|forget NODE
request_is_done() { [ -z "$(kubectl get pool "$1" -o "jsonpath={.spec.$2}")" ]; } # POOL adopt|forget
condition_of() { kubectl get pool "$1" -o "jsonpath={.status.conditions[?(@.type==\"$2\")].reason}: {.status.conditions[?(@.type==\"$2\")].message}"; } # POOL TYPE
has_condition() { [[ $(condition_of "$1" "$2") == "$3:"* ]]; } # POOL TYPE REASON
shown_in_vain() { [[ $(kubectl get pool "$1" -o 'jsonpath={.status.health}') =~ ^(NotServed|Conflict)$ ]]; }
waits_for_volumes() { [[ $(kubectl get pool "$1" -o 'jsonpath={.status.node} {.status.message}') == "$NODE_1"*"3 PersistentVolumes"* ]]; }
is_there() { [ "$(node_of "$1")" = "$2" ]; }
detached() { ! kubectl get volumeattachments -o 'jsonpath={.items[*].spec.source.persistentVolumeName}' | grep -q "$1"; }
healthy() { [ "$(kubectl get pool "$1" -o 'jsonpath={.status.health}')" = Healthy ]; }
