# From one version of the image to another and back, with the chart, while pods write. With
# E2E_FROM=FOLDER, a checkout of another release with its program built in FOLDER/target (cargo build
# --release), the upgrade is from that release, with its chart, to the installed one; otherwise from the
# installed image to the same image under another tag.
# shellcheck shell=bash

chart() { helm "$1" slackwater "${@:2}" --namespace $SYSTEM >/dev/null; }
to() { # CHECKOUT TAG: with the values of the installation
    chart upgrade "$1/deploy/chart" --reset-then-reuse-values --set-string "image.tag=$2"
}
image_of() { # CHECKOUT TAG TARGET: builds an image of the program in TARGET/release, and loads it into all nodes
    local archive=$TARGET/slackwater-image-$2.tar
    IMAGE_NAME=slackwater:$2 IMAGE_OUT=$archive IMAGE_PROGRAM=$3/release/slackwater "$1/deploy/image/build" >/dev/null 2>&1
    load_image "$archive"
}
only_image() { # TAG
    [ "$(kubectl -n $SYSTEM get pods -o 'jsonpath={range .items[*]}{range .spec.containers[*]}{.image}{"\n"}{end}{range .spec.initContainers[*]}{.image}{"\n"}{end}{end}' | grep slackwater | sort -u)" = "slackwater:$1" ]
}
all_run() { # TAG: waits until all pods of the driver run, and no others
    local workload
    for workload in $(kubectl -n $SYSTEM get daemonset,deployment -o name); do
        kubectl -n $SYSTEM rollout status --timeout="$WAIT" "$workload" >/dev/null || return 1
    done
    # Earlier pods may take a moment to end.
    eventually 120 only_image "$1"
    note "images of the driver's containers: slackwater:$1"
}

test_upgrade_and_rollback_while_pods_write() {
    local here=$E2E/../.. now old new said
    now=$(kubectl -n $SYSTEM get daemonset -o 'jsonpath={.items[0].spec.template.spec.containers[0].image}')
    now=${now#*:}
    # Also after a failure: the next tests use the original installation.
    trap 'to "$here" "$now" 2>/dev/null || :' EXIT
    if [ -n "${E2E_FROM:-}" ]; then
        old=e2e-old new=$now
        image_of "$E2E_FROM" "$old" "$E2E_FROM/target"
        to "$E2E_FROM" "$old"
        all_run "$old"
    else
        old=$now new=e2e-next
        image_of "$here" "$new" "$TARGET"
    fi
    writer
    block_writer
    ask 1
    answered 1
    said=$(inside load 'cat /tmp/said')
    to "$here" "$new"
    ask 2
    withdraw 1
    group_of during load
    all_run "$new"
    answered 2
    ready_group during
    restored_has r2-3 "$said"
    writes_on
    block_writes_on
    chart rollback
    ask 3
    withdraw 2
    group_of back load
    all_run "$old"
    answered 3
    ready_group back
    withdraw 3
    writes_on
    block_writes_on
    # Volumes that were published under one release are unpublished under the other.
    gone pod/disk
    gone pvc/disk
    nothing_frozen
    gone volumegroupsnapshot --all
    to "$here" "$now"
    all_run "$now"
    trap - EXIT
}
