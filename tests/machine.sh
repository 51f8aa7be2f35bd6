#!/bin/bash
# Checks whether a command leaves the machine as it found it.
#
#   tests/machine.sh around COMMAND...    runs it with a TMPDIR of its own, and checks afterwards
#   tests/machine.sh before FILE          records the present state
#   tests/machine.sh after FILE           prints what was added since; exits with 1 if anything was
#
# The check covers only objects of this project, so that other programs running at the same time do
# not fail it:
# - loop devices and mounts whose file or path has a folder named `slackwater-...`,
# - processes whose command line has one, and processes named slackwater,
# - files in TMPDIR with such a name, volume groups with such a name, and the driver's default
#   folders.
# `around` checks everything in its own TMPDIR, and the driver's default folders. If those are not
# empty, it runs in a mount namespace in which they are, so that neither the tests nor the check
# depend on what an earlier run or a driver left there.
#
# Therefore every test keeps its files below a temporary folder (in TMPDIR) that is named
# `slackwater-...`.

set -euo pipefail

say() { printf '%s\n' "$*" >&2; }
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }

# Loop devices, mounts and processes with a text in their path or command line.
traces() {
    local device file pid line
    for device in /sys/block/loop*; do
        file=$(cat "$device/loop/backing_file" 2>/dev/null) || continue
        [[ $file != *"$1"* ]] || echo "loop device on $file"
    done
    while read -r _ _ _ _ line _; do
        line=$(printf '%b' "$line") # \040 is a blank
        [[ $line != *"$1"* ]] || echo "mount at $line"
    done </proc/self/mountinfo
    for pid in /proc/[0-9]*; do
        line=$(as_root cat "$pid/cmdline" 2>/dev/null | tr '\0' ' ') || continue
        # Neither this script nor the command that it runs.
        [[ $line != *"$1"* || $line == *tests/machine.sh* ]] || echo "process ${pid#/proc/}: $line"
    done
}

everything() {
    traces /slackwater-
    local pid
    for pid in $(pgrep -x slackwater || true); do echo "process $pid named slackwater"; done
    find "${TMPDIR:-/tmp}" -maxdepth 1 -name 'slackwater-*' -printf 'left %p\n'
    ! command -v vgs >/dev/null ||
        as_root vgs --noheadings --options vg_name 2>/dev/null | grep --only-matching 'slackwater.*' |
        sed 's/^/volume group /' || true
    default_folders
}

# Tests use folders of their own, so these belong to a driver in use.
defaults=(/run/slackwater /var/lib/slackwater)
default_folders() { find "${defaults[@]}" "$@" -printf 'file %p\n' 2>/dev/null || true; }

# Runs this script again in a mount namespace with empty default folders.
shadowed() {
    local user
    user=$(id -u)
    # shellcheck disable=SC2016
    local hide='
        for folder in '"${defaults[*]}"'; do
            [ ! -d "$folder" ] || mount -t tmpfs slackwater-shadow "$folder"
        done
        mount --make-rshared /'
    if [ "$user" = 0 ]; then
        exec unshare --mount --propagation slave bash -euc "$hide"'; exec "$@"' bash "$0" "$@"
    fi
    exec sudo --preserve-env unshare --mount --propagation slave \
        bash -euc "$hide"'; exec sudo --preserve-env --user "#$0" env "PATH=$PATH" "$@"' "$user" "$0" "$@"
}

# Waits a moment for processes that end by themselves.
settled() {
    local left end=$((SECONDS + ${MACHINE_MAX_WAIT:-60}))
    while left=$("$@") && [ -n "$left" ] && [ "$SECONDS" -lt "$end" ]; do sleep 0.2; done
    [ -n "$left" ] || return 0
    printf '%s\n' "$left"
}

around() {
    local code=0 left folders_before
    [ -z "$(default_folders -mindepth 1)" ] || shadowed around "$@"
    work=$(mktemp --directory /tmp/slackwater-run.XXXX)
    chmod 711 "$work" # databases, which refuse to run as root, pass through
    folders_before=$(default_folders | sort)
    TMPDIR=$work "$@" || code=$?
    left=$(settled rest "$folders_before")
    if [ -n "$left" ]; then
        say "The machine is not as it was found:"
        say "$left"
        # For tests/summary, which prints it at the end.
        [ -z "${MACHINE_LOG:-}" ] || printf '%s\n' "$left" >"$MACHINE_LOG"
        [ "$code" != 0 ] || code=1
        # A folder with content stays for inspection.
        as_root rmdir --ignore-fail-on-non-empty -- "$work"
    else
        say "The machine is as it was found."
        as_root rm -rf --one-file-system -- "$work"
    fi
    return "$code"
}

# rest FOLDERS: leftovers that `around` must not find.
rest() {
    traces "$work"
    as_root find "$work" -mindepth 1 -maxdepth 1 -printf 'left %p\n'
    comm -13 <(printf '%s\n' "$1") <(default_folders | sort)
}

new_since() { comm -13 - <(everything | sort --unique) <"$1"; }

case ${1:-} in
around) around "${@:2}" ;;
before) everything | sort --unique >"$2" ;;
after)
    left=$(settled new_since "$2")
    [ -z "$left" ] || { say "The machine is not as it was found:"; say "$left"; exit 1; }
    say "The machine is as it was found."
    ;;
*) sed --quiet '2,/^$/s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
