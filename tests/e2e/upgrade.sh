# From one version of the image to another and back, with the chart, while pods write.
# shellcheck shell=bash

chart() { helm "$1" slackwater "${@:2}" --namespace $SYSTEM >/dev/null; }
all_run() { # IMAGE: each pod of the driver, and nothing else
    local workload
    for workload in $(kubectl -n $SYSTEM get daemonset,deployment -o name); do
        kubectl -n $SYSTEM rollout status --timeout="$WAIT" "$workload" >/dev/null || return 1
    done
    is "images of the driver's containers" "$(kubectl -n $SYSTEM get pods -o 'jsonpath={range .items[*]}{range .spec.containers[*]}{.image}{"\n"}{end}{range .spec.initContainers[*]}{.image}{"\n"}{end}{end}' | grep slackwater | sort -u)" "$1"
}

test_upgrade_and_rollback_while_pods_write() {
    local old tag=e2e-next said archive=$E2E/../../target/slackwater-image-next.tar
    old=$(kubectl -n $SYSTEM get daemonset -o 'jsonpath={.items[0].spec.template.spec.containers[0].image}')
    # What is built now, as another version of the image.
    IMAGE_NAME=slackwater:$tag IMAGE_OUT=$archive "$E2E/../../deploy/image/build" >/dev/null 2>&1
    "$CLUSTER/image" load "$archive"
    writer
    ask 1
    answered 1
    said=$(inside load 'cat /tmp/said')
    trap 'chart rollback 2>/dev/null || :' EXIT
    chart upgrade "$E2E/../../deploy/chart" --reset-then-reuse-values --set-string "image.tag=$tag"
    ask 2
    withdraw 1
    group_of during load
    all_run "slackwater:$tag"
    answered 2
    ready_group during
    restored_has r2-3 "$said"
    writes_on
    trap - EXIT
    chart rollback
    ask 3
    withdraw 2
    group_of back load
    all_run "$old"
    answered 3
    ready_group back
    withdraw 3
    writes_on
    nothing_frozen
    gone volumegroupsnapshot --all
}
