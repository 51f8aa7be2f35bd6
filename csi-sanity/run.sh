#!/bin/bash
# Runs two releases of csi-sanity against the real binary.
#
#   csi-sanity/run.sh [memory|memory-thin|router|xfs|btrfs|ext4|lvm] ...   all, if none is named
#
# memory, memory-thin and router need no root; memory-thin stores volumes as simulated thin devices. router is a cluster: a router and two agents with memory pools;
# the suite's controller is the router, and its node is the first agent. xfs, btrfs and ext4 are
# pools in a folder on that file system, on a loop device that this script creates. Each is tested
# with mounted volumes (ext4, xfs, btrfs) and with raw block volumes. lvm is a thin pool of LVM in a
# guest kernel (tests/guest), for which this script starts itself again there; with mounted volumes
# of ext4 and with raw block volumes.
#
#   SLACKWATER=FILE     the binary; by default, the script makes the debug build
#   SANITY_POOL=DIR     a folder on the file system to test, instead of a loop device
#   SANITY_GUEST=1      set by this script in the guest
#   SANITY_RUNS=GLOB    only these runs, for example 'xfs/5.6.0/*' or '*/block'
#
# A skipped test needs a reason in skipped.txt. The last line is "N passed, N failed, N skipped",
# and the exit code is 0 only without failures. Logs are kept in target/csi-sanity/logs.

set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(dirname "$here")
target=$(realpath --canonicalize-missing "${CARGO_TARGET_DIR:-$repository/target}")
bin=$target/csi-sanity/bin
logs=$target/csi-sanity/logs
versions=(5.5.0 5.6.0)
volumes=(mount-ext4 mount-xfs mount-btrfs block)
MIB=$((1024 * 1024))
# Just above the smallest xfs, and not a multiple of a large power of two, so that rounding is
# visible.
size=$((321 * MIB)) larger_size=$((417 * MIB))

work='' driver='' child='' pool='' controller=''
# Processes of a cluster besides the driver that is the suite's node.
others=()
passed=0 failed=0 skipped=0

say() { printf '%s\n' "$*" >&2; }
die() { say "csi-sanity/run.sh: $*"; exit 2; }
complain() { say "FAILED $*"; failed=$((failed + 1)); }

# --- Cleanup, also after a failure ---------------------------------------------------------------

cleanup() {
    local code=$?
    trap '' INT TERM HUP
    trap - EXIT
    set +e
    [ -z "$child" ] || end "$child" 5
    [ -z "$driver" ] || end "$driver" 30
    for other in "${others[@]}"; do end "$other" 30; done
    if [ -n "$work" ]; then
        [ -z "$pool" ] || free_below "$pool"
        free_below "$work"
        rm -rf --one-file-system -- ${pool:+"$pool"} "$work"
    fi
    exit "$code"
}

# Ends one of our own processes, with SIGKILL after some seconds.
end() {
    local tenth
    kill -TERM "$1" 2>/dev/null || return 0
    for ((tenth = 0; tenth < $2 * 10; tenth++)); do
        kill -0 "$1" 2>/dev/null || return 0
        sleep 0.1
    done
    kill -KILL "$1" 2>/dev/null || true
}

# Unmounts innermost mounts first. A loop device created by mount is detached with its mount.
free_below() {
    local path device
    while read -r path; do
        umount "$path" || umount --lazy "$path" || true
    done < <(mounts_below "$1" | sort --reverse)
    while read -r device; do
        losetup --detach "$device" || true
    done < <(loops_below "$1")
}

mounts_below() {
    findmnt --raw --noheadings --output TARGET | awk -v root="$1/" 'index($0, root) == 1'
}

loops_below() {
    losetup --list --noheadings --raw --output NAME,BACK-FILE |
        awk -v root="$1/" 'index($2, root) == 1 { print $1 }'
}

trap cleanup EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

# Runs a command so that a signal to this script ends it at once.
run() {
    local code=0
    "$@" &
    child=$!
    wait "$child" || code=$?
    child=''
    return "$code"
}

# --- Parts ---------------------------------------------------------------------------------------

build() {
    command -v go >/dev/null || die "go is missing"
    say "building csi-sanity ${versions[*]}"
    local version
    for version in "${versions[@]}"; do
        mkdir -p "$bin/$version"
        (cd "$here/suite" && go build -modfile="$(modfile "$version")" -o "$bin/$version/" \
            ./... github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity)
    done
    if [ -z "${SLACKWATER:-}" ]; then
        (cd "$repository" && cargo build --quiet --bins)
        SLACKWATER=$target/debug/slackwater
    fi
    [ -x "$SLACKWATER" ] || die "no binary at $SLACKWATER"
    # The tests of cargo run programs with planned faults, and these run them as they are released.
    local program
    for program in "$SLACKWATER" "$(dirname "$SLACKWATER")/slackwater-guard"; do
        ! grep --quiet SLACKWATER_FAULT "$program" || die "$program was built with the feature fault"
    done
}

modfile() { case $1 in 5.5.0) echo v5.5.mod ;; *) echo go.mod ;; esac; }

# The older release runs with the defaults, as for most users, and would refuse the capabilities of
# health; the newer one runs with every alpha feature.
alpha() {
    case $1 in
    5.5.0) ;;
    *) echo --alpha snapshot-metadata,health,get-volume,get-snapshot,snapshot-topology ;;
    esac
}

simulated() {
    case $1 in memory | memory-thin | router) ;; *) return 1 ;; esac
}

# run_in_guest KIND: tests this kind in a guest kernel, and adds its numbers.
run_in_guest() {
    local p f s log=$logs/$1
    [ "$(id -u)" = 0 ] || die "$1 needs root, for device mapper"
    mkdir -p "$log"
    run "$repository/tests/guest/guest-run" --disk pool:6G --mem 1G --timeout 1500 --env SANITY_GUEST=1 \
        --env SLACKWATER="$SLACKWATER" --env SANITY_RUNS="${SANITY_RUNS:-*}" \
        --env CARGO_TARGET_DIR="$target" -- "$here/run.sh" "$1" >"$log/guest.log" || true
    if ! read -r p f s < <(sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped$/\1 \2 \3/p' "$log/guest.log"); then
        complain "$1: the guest printed no result"
        tail -n 20 "$log/guest.log" >&2
        return
    fi
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
}

# make_thin_pool: creates a thin pool as an administrator does.
make_thin_pool() {
    vgcreate --quiet sanity-vg "$GUEST_DISK_POOL"
    lvcreate --quiet --type thin-pool --size 4G --poolmetadatasize 16M --chunksize 64k --name thin sanity-vg
    lvchange --quiet --errorwhenfull y sanity-vg/thin
} >&2

# make_file_system KIND: sets $folder to a folder for pools of this kind.
make_file_system() {
    local kind=$1
    if simulated "$kind"; then return; fi
    [ "$(id -u)" = 0 ] || die "$kind needs root, for loop devices and mounts"
    if [ "$kind" = lvm ]; then
        make_thin_pool
        return
    fi
    if [ -n "${SANITY_POOL:-}" ]; then
        folder=$SANITY_POOL
        return
    fi
    folder=$work/$kind
    mkdir "$folder"
    truncate --size 16G "$folder.img"
    case $kind in
    xfs) mkfs.xfs -q -m reflink=1 "$folder.img" ;;
    btrfs) mkfs.btrfs --quiet "$folder.img" ;;
    ext4) mkfs.ext4 -q "$folder.img" ;;
    esac
    mount -o loop "$folder.img" "$folder"
}

# drop_thin_pool: the driver must have left no device, no reserved metadata and no errors in it.
drop_thin_pool() {
    local held mapped=sanity--vg-thin
    "$SLACKWATER" pool release default=lvm:sanity-vg/thin --node-record "$work/lvm.json" >&2 ||
        complain "lvm: the pool is not released"
    # "0 LENGTH thin-pool TRANSACTION METADATA DATA HELD ..."
    read -r _ _ _ _ _ _ held _ < <(dmsetup status "$mapped")
    [ "$held" = - ] || complain "lvm: the metadata of the pool is reserved: $held"
    # This fails while a device shows the pool.
    dmsetup remove "$mapped" >&2 || complain "lvm: devices were left: $(dmsetup ls)"
    thin_check "/dev/mapper/${mapped}_tmeta" >&2 || complain "lvm: the metadata of the pool has errors"
    vgchange --quiet --activate n sanity-vg >&2 && vgck sanity-vg || complain "lvm: the group is not clean"
}

drop_file_system() {
    if [ "$1" = lvm ]; then
        drop_thin_pool
        return
    fi
    if simulated "$1" || [ -n "${SANITY_POOL:-}" ]; then return; fi
    umount "$folder"
    rm -r -- "$folder" "$folder.img"
}

# start_cluster VERSION: sets $home, $endpoint, $controller, $driver and $others.
start_cluster() {
    local node address tls agents=() log=$logs/router/$1
    home=$work/router-$1
    tls=$home/tls
    mkdir -p "$home/csi" "$home/router" "$log"
    "$SLACKWATER" certificates --out "$tls" --node sanity-node --node sanity-other >/dev/null
    for node in sanity-node sanity-other; do
        mkdir -p "$home/$node"
        : >"$log/$node.log"
        # shellcheck disable=SC2046 # No alpha features are no words.
        "$SLACKWATER" serve --role node --endpoint "unix://$home/$node/csi.sock" \
            --node-name "$node" --pool default=memory: --state-dir "$home/$node-state" \
            --node-record "$home/$node.json" --allowed-path "$home" --agent-listen 127.0.0.1:0 \
            --tls-cert "$tls/node-$node.crt" --tls-key "$tls/node-$node.key" --tls-ca "$tls/ca.crt" \
            $(alpha "$1") >>"$log/$node.log" 2>&1 &
        others+=($!)
        address=$(listens "$log/$node.log") || return 1
        agents+=(--agent "$node=$address")
    done
    endpoint=unix://$home/sanity-node/csi.sock
    controller=unix://$home/router/csi.sock
    # shellcheck disable=SC2046
    "$SLACKWATER" serve --role controller --endpoint "$controller" "${agents[@]}" \
        --tls-cert "$tls/controller.crt" --tls-key "$tls/controller.key" --tls-ca "$tls/ca.crt" \
        --metrics-address 127.0.0.1:0 $(alpha "$1") >"$log/driver.log" 2>&1 &
    driver=$!
    await "$1" "$controller" "$log"
}

# listens LOG: the address on which an agent logged that it listens.
listens() {
    local tenth found
    for ((tenth = 0; tenth < 300; tenth++)); do
        found=$(sed -n 's/.*listening for the controller address=\([0-9.:]*\).*/\1/p' "$1")
        if [ -n "$found" ]; then
            echo "$found"
            return
        fi
        sleep 0.1
    done
    tail -n 5 "$1" >&2
    return 1
}

# await VERSION ENDPOINT LOGS: waits until the driver is ready.
await() {
    local second
    for ((second = 0; second < 30; second++)); do
        run "$bin/$1/ready" "$2" 1s 2>"$3/ready.log" && return
        kill -0 "$driver" 2>/dev/null || break
    done
    cat "$3/ready.log" >&2
    tail -n 5 "$3/driver.log" >&2
    return 1
}

# start_driver KIND VERSION: sets $home, $endpoint, $controller, $pool, $driver and $others.
start_driver() {
    local definition=default=memory: record
    controller=''
    if [ "$1" = router ]; then
        start_cluster "$2"
        return
    fi
    home=$work/$1-$2
    record=$home/node.json
    # The thin pool is the same for both releases, so its home must be the same.
    [ "$1" != lvm ] || record=$work/lvm.json
    mkdir -p "$home/csi" "$logs/$1/$2"
    if [ "$1" = memory-thin ]; then
        definition=default=memory-thin:
    elif [ "$1" = lvm ]; then
        definition=default=lvm:sanity-vg/thin,init,overcommit=64,rawBlock=unfiltered
    elif [ "$1" != memory ]; then
        pool=$(mktemp --directory "$folder/slackwater-sanity-pool.XXXXXX")
        definition=default=file:$pool,init,mount=any
    fi
    endpoint=unix://$home/csi/csi.sock
    # shellcheck disable=SC2046 # No alpha features are no words.
    "$SLACKWATER" serve --role all --endpoint "$endpoint" --node-name sanity-node \
        --pool "$definition" --state-dir "$home/state" --node-record "$record" \
        --allowed-path "$home" --metrics-address 127.0.0.1:0 $(alpha "$2") \
        >"$logs/$1/$2/driver.log" 2>&1 &
    driver=$!
    await "$2" "$endpoint" "$logs/$1/$2"
}

# stop_driver KIND VERSION: the driver must exit successfully, and leave nothing behind.
stop_driver() {
    local name="$1/$2" log=$logs/$1/$2/driver.log process code left
    for process in $driver "${others[@]}"; do
        code=0
        end "$process" 30
        wait "$process" || code=$?
        [ "$code" = 0 ] || { complain "$name: a driver ended with $code"; tail -n 20 "$log" >&2; }
    done
    driver='' others=()
    left=$(mounts_below "$home"; [ -z "$pool" ] || { mounts_below "$pool"; loops_below "$pool"; })
    if [ -n "$left" ]; then
        complain "$name: left behind: $left"
        free_below "$home"
        [ -z "$pool" ] || free_below "$pool"
    fi
    ! grep --quiet not-for-logs "$logs/$1/$2"/*.log || complain "$name: secrets are in $logs/$1/$2"
    [ -z "$pool" ] || rm -rf --one-file-system -- "$pool"
    pool=''
}

# test_volumes KIND VERSION VOLUME: one run of the suite.
test_volumes() {
    local name=$1/$2/$3 counts
    local log=$logs/$name command=("$bin/$2/csi-sanity") access=mount wipe=zero
    case $3 in
    block) access=block ;;
    # The driver's default: this is upstream's unchanged command.
    mount-ext4) ;;
    mount-*) command=("$bin/$2/fstype" -fstype "${3#mount-}") ;;
    esac
    # The suite knows only one of the two nodes.
    if [ "$1" = router ]; then
        case $3 in
        mount-xfs | mount-btrfs) ;;
        *) command=("$bin/$2/fstype") ;;
        esac
        command+=(-at-node)
    fi
    # Shared blocks cannot be overwritten in place, so the driver refuses zeroing there.
    case $1 in btrfs | memory-thin | lvm) wipe=discard ;; esac
    # A memory pool's mounts are not in this machine's file tree, where the test looks for them.
    ! simulated "$1" || command+=(-ginkgo.skip 'NodeUnpublishVolume should remove target path')
    # Upstream compares Go's messages with their internal fields, and these differ between a sent
    # and a received message: no driver that reports the topology of a snapshot can pass.
    [ "$2" = 5.5.0 ] || command+=(-ginkgo.skip 'creating a snapshot with accessibility requirements')
    mkdir -p "$log"
    rm -f "$log/report.json"
    # The report contains the failures; the exit code adds nothing.
    run "${command[@]}" \
        -csi.endpoint "$endpoint" -csi.controllerendpoint "$controller" -csi.mountdir "$home/mount" -csi.stagingdir "$home/staging" \
        -csi.secrets "$here/secrets.yaml" -csi.testvolumeaccesstype "$access" \
        -csi.testvolumesize "$size" -csi.testvolumeexpandsize "$larger_size" \
        -csi.testvolumeparameters "$here/volume.yaml" \
        -csi.testvolumemutableparameters "$here/mutable-$wipe.yaml" \
        -csi.testsnapshotparameters "$here/snapshot.yaml" \
        -ginkgo.v -ginkgo.no-color -ginkgo.timeout 30m -ginkgo.json-report "$log/report.json" \
        >"$log/sanity.log" 2>&1 || true
    counts=$("$bin/$2/report" "$name" "$log/report.json" "$here/skipped.txt" 2>"$log/notes") ||
        counts='0 1 0'
    grep --invert-match '^skipped ' "$log/notes" >&2 || true
    read -r p f s <<<"$counts"
    say "$name: $p passed, $f failed, $s skipped"
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
}

wanted() {
    # shellcheck disable=SC2254 # A glob is meant.
    case $1 in ${SANITY_RUNS:-*}) return 0 ;; *) return 1 ;; esac
}

# --- Main ----------------------------------------------------------------------------------------

kinds=("$@")
[ $# -gt 0 ] || kinds=(memory memory-thin router xfs btrfs ext4 lvm)
for kind in "${kinds[@]}"; do
    case $kind in memory | memory-thin | router | xfs | btrfs | ext4 | lvm) ;; *) die "no such pool: $kind" ;; esac
done
if [ -z "${SANITY_GUEST:-}" ]; then
    build
    rm -rf -- "${kinds[@]/#/$logs/}"
fi
# Short, because a socket's path has at most 107 bytes.
work=$(mktemp --directory "${TMPDIR:-/tmp}/slackwater-sanity.XXXX")
mkdir -p "$logs"

for kind in "${kinds[@]}"; do
    if [ "$kind" = lvm ] && [ -z "${SANITY_GUEST:-}" ]; then
        run_in_guest "$kind"
        continue
    fi
    # A guest has one slow processor.
    [ "$kind" != lvm ] || volumes=(mount-ext4 block)
    make_file_system "$kind"
    for version in "${versions[@]}"; do
        todo=()
        for volume in "${volumes[@]}"; do
            ! wanted "$kind/$version/$volume" || todo+=("$volume")
        done
        [ ${#todo[@]} -gt 0 ] || continue
        if start_driver "$kind" "$version"; then
            for volume in "${todo[@]}"; do test_volumes "$kind" "$version" "$volume"; done
        else
            complain "$kind/$version: the driver didn't become ready"
        fi
        stop_driver "$kind" "$version"
    done
    drop_file_system "$kind"
done

[ $((passed + failed)) -gt 0 ] || complain "nothing was run"
find "${kinds[@]/#/$logs/}" -name notes -exec cat {} + | grep '^skipped ' | sort | uniq --count || true
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
