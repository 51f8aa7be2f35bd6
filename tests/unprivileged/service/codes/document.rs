//! `docs/errors.md`, generated from the table.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use nix::errno::Errno;
use slackwater::error::{Error, HostCause, HostError, Kind, Mismatch};
use slackwater::service::status::{code, code_name};
use slackwater::service::{Rpc, status};
use tonic::Code;

use crate::service::harness::Node;
use crate::service::refusals;

const PAGE: &str = "docs/errors.md";

/// A condition: its name on the page, an example, and the behavior of callers.
struct Condition {
    name: &'static str,
    example: Error,
    meaning: &'static str,
}

/// Each variant has one name. A new variant must be named here, and described below.
fn name_of(error: &Error) -> &'static str {
    match error {
        Error::Invalid { .. } => "Invalid",
        Error::NotFound { .. } => "Not found",
        Error::Exists { .. } => "Exists",
        Error::Pending { .. } => "Pending",
        Error::GroupInDoubt { .. } => "Group in doubt",
        Error::InUse { .. } => "In use",
        Error::Refused { .. } | Error::Locked { .. } => "Refused",
        Error::Busy { .. } => "Busy",
        Error::OutOfSpace { .. } => "Out of space",
        Error::SpaceGuaranteed { .. } => "Space guaranteed",
        Error::OutOfMetadata { .. } => "Out of metadata",
        Error::OutOfRange { .. } => "Out of range",
        Error::TopologyMismatch { .. } => "Topology mismatch",
        Error::Unfit { .. } => "Unfit",
        Error::BadToken { .. } => "Bad token",
        Error::Unreachable { .. } => "Unreachable",
        Error::NotEnabled { .. } => "Not enabled",
        Error::Damaged { .. } => "Damaged",
        Error::Host { .. } if error.is_no_space() => "Host: disk full",
        Error::Host { source, .. } if source.is_too_large() => "Host: file too large",
        Error::Host { source, .. } => match source.cause {
            HostCause::Missing { .. } => "Host: program missing",
            HostCause::NoAnswer => "Host: no answer",
            HostCause::Errno(_) | HostCause::Tool { .. } | HostCause::Unexpected(_) => "Host",
        },
        Error::RollbackFailed { .. } => "Rollback failed",
        Error::QuiesceFailed { .. } => "Quiesce failed",
        Error::CutLost { .. } => "Cut lost",
        Error::Paused { .. } => "Paused",
        Error::Forwarded { .. } => "Forwarded",
        Error::Stopping => "Stopping",
        Error::Bug { .. } => "Bug",
    }
}

/// The number of names in [`name_of`].
const NAMES: usize = 30;

const VOLUME: &str = "5f0c...e1.8a27...3d";

fn conditions() -> Vec<Condition> {
    let errno = |errno| HostError::errno("write", "/pool/volumes/8a27...3d/data.img", errno);
    let host = |doing: &str, source| Error::Host {
        doing: format!("{doing} volume {VOLUME}"),
        source,
    };
    let missing = HostError {
        action: "run",
        subject: "mkfs.xfs".into(),
        cause: HostCause::Missing {
            program: "mkfs.xfs".into(),
            package: "xfsprogs",
        },
    };
    let of = |example: Error, meaning| Condition {
        name: name_of(&example),
        example,
        meaning,
    };
    vec![
        of(
            Error::invalid(
                "volume_capability.mount.fs_type",
                "\"ntfs\" is not supported; give ext4, xfs, btrfs, or nothing for ext4",
            ),
            "The request is invalid and nothing was changed. Correct the class, the claim or the caller; a retry gets the same answer. The resizer marks a modification as infeasible.",
        ),
        of(
            Error::no_volume(VOLUME),
            "The pool to which the ID belongs was searched, and the object does not exist. Delete, unstage, unpublish and detach of an object that does not exist return OK instead.",
        ),
        of(
            Error::Exists {
                kind: Kind::Volume,
                id: "\"pvc-7\"".into(),
                mismatch: Mismatch {
                    field: "capacity_bytes",
                    found: "1073741824".into(),
                    wanted: "at least 2147483648".into(),
                },
            },
            "An object of this name or at this path exists with different attributes; the message names the first difference. Nothing was changed.",
        ),
        of(
            Error::Pending {
                what: format!("volume {VOLUME}"),
            },
            "An earlier call is still running. Callers retry and then get its result.",
        ),
        of(
            Error::GroupInDoubt {
                group: "0c1d...9f".into(),
                reason: "the agent of node node-b is unavailable: it did not answer within 5 s".into(),
            },
            "A member of a group cannot be deleted as long as a node has a member that is neither committed nor aborted. Callers retry; the call succeeds after that node answers.",
        ),
        of(
            Error::InUse {
                id: VOLUME.into(),
                holder: "staged at /var/lib/kubelet/...; unstage it first".into(),
            },
            "The volume is in use; the message says by what. Provisioner and kubelet retry until it is free; the resizer waits until no pod uses the claim.",
        ),
        of(
            Error::refused(
                format!("volume {VOLUME}"),
                "it was used as block, and access type mount would destroy its data",
            ),
            "The state of the volume does not allow the operation; the message says what to do.",
        ),
        of(
            Error::Busy {
                subject: format!("volume {VOLUME}"),
                holder: "/dev/loop7 maps only a part of its image; detach it".into(),
            },
            "A foreign process, mount or device uses the image. Callers retry; the driver does not touch the foreign object.",
        ),
        of(
            Error::OutOfSpace {
                pool: "default".into(),
                enlarge: "enlarge the pool".into(),
                required: 2 << 30,
                available: 1 << 30,
            },
            "A new volume is scheduled to another node if the claim allows it; other calls are retried until there is space.",
        ),
        of(
            Error::SpaceGuaranteed {
                pool: "default".into(),
                enlarge: "enlarge the thin pool: lvextend --size +SIZE vg/pool".into(),
                provisioned: 8 << 30,
                room: 7 << 30,
            },
            "Only for snapshots: no snapshot was created. Callers retry until it fits.",
        ),
        of(
            Error::OutOfMetadata {
                pool: "default".into(),
                place: "vg/pool".into(),
                required: 9 << 20,
                available: 8 << 20,
            },
            "Nothing was created. Callers retry until there is more metadata, or the scheduler selects another node.",
        ),
        of(
            Error::OutOfRange {
                field: "capacity_range.limit_bytes".into(),
                problem: "104857600 is below the 314572800 bytes that this kind of volume needs"
                    .into(),
            },
            "No size within the range is possible. The user can change the claim; an expansion that is infeasible can be reverted.",
        ),
        of(
            Error::TopologyMismatch {
                home: "0b5c...77".into(),
            },
            "The requested topology only allows other nodes. The provisioner asks the scheduler for another node.",
        ),
        of(
            Error::Unfit {
                pool: "default".into(),
                reason: "the block size of the snapshot is 512 bytes, which its copy must keep, but that of the disk of the pool is 4096 bytes".into(),
            },
            "The snapshot of another node cannot be copied into this pool. Nothing is left here. The provisioner asks the scheduler for another node.",
        ),
        of(
            Error::BadToken {
                token: "abc".into(),
            },
            "Start the list again.",
        ),
        of(
            Error::Unreachable {
                what: "pool fast (5f0c...e1)".into(),
                reason: "/disks/fast contains no pool, but this machine had it at file:/disks/fast; is its disk mounted?"
                    .into(),
            },
            "Until the pool is back it is unknown whether the object exists. Callers retry, and keep the object in their records.",
        ),
        of(
            Error::NotEnabled {
                what: "ControllerGetVolume (an alpha feature of CSI; --alpha get-volume)"
                    .into(),
            },
            "Callers that check the capabilities do not make this call.",
        ),
        of(
            Error::Damaged {
                path: "/pool/volumes/8a27...3d/record.json".into(),
                problem: "not a record of a volume: expected value at line 1 column 1".into(),
            },
            "The record cannot be read. It is left unchanged for an administrator. Callers retry.",
        ),
        of(
            host("grow", errno(Errno::EIO)),
            "The kernel or a program reported an error; all completed steps were undone, durably. The provisioner may forget the volume: nothing of it is left. A claim that still exists is retried.",
        ),
        of(host("create", errno(Errno::ENOSPC)), "See Out of space."),
        of(
            host("grow", errno(Errno::EFBIG)),
            "See Out of range: the pool's file system does not support files of this size (ext4: 16 TiB), regardless of its free space. Nothing is left.",
        ),
        of(
            host("format", missing),
            "Install the package, or use another file system. Nothing is left.",
        ),
        of(
            host(
                "find the loop devices of",
                HostError::no_answer("query the image of", "/dev/loop7"),
            ),
            "A disk or server hangs, so the state of the object is unknown. Callers retry, and keep the object in their records.",
        ),
        of(
            Error::RollbackFailed {
                first: Box::new(host("create", errno(Errno::EIO))),
                undo: "remove /pool/volumes/8a27...3d: EIO".into(),
            },
            "Something was left behind, and the caller must not forget it: a retry or the next start of the driver cleans it up.",
        ),
        of(
            Error::QuiesceFailed {
                hook: "orders-db".into(),
                reason: "it exited with exit status: 2 before it printed READY: FATAL: the database system is starting up".into(),
            },
            "No snapshot was created in any attempt, and the class allows no lower level (`onQuiesceFailure`). Check the hook's program and its application. The snapshotter retries, and gets Paused.",
        ),
        of(
            Error::CutLost {
                reason: format!("writers of volume {VOLUME} continued before it was cut"),
            },
            "No snapshot was created: the copies are not proven to be from one point in time. If it happens again, raise `freezeTimeout`, or find the other program that thaws.",
        ),
        of(
            Error::Paused {
                seconds: 118,
                sets: 2,
                last: Error::QuiesceFailed {
                    hook: "orders-db".into(),
                    reason: "it did not print READY within 30000 ms".into(),
                }
                .into(),
            },
            "The recorded failure, with its own code: callers retry indefinitely, and neither the application nor its file system is disturbed for 1, then 2, 4 ... 30 minutes. The pause applies to these volumes with these class parameters; calls for other volumes, or with other parameters, are not paused.",
        ),
        of(
            Error::Forwarded {
                code: Code::ResourceExhausted as i32,
                message: "pool default has 0 bytes available, but 1073741824 are needed; delete snapshots or volumes that are not needed, or enlarge the pool".into(),
            },
            "The answer of a node's agent to the cluster's router, which passes message and code on unchanged; in this example a full pool.",
        ),
        of(
            Error::Stopping,
            "The driver is being stopped. Callers retry, and reach its next instance.",
        ),
        of(
            Error::Bug {
                invariant: "no operation panics".into(),
            },
            "A bug in the driver: please report it. A retry or the next start cleans up what it left behind.",
        ),
    ]
}

/// Why a code differs from that of the other calls.
fn exception(condition: &str, code: Code) -> &'static str {
    match (condition, code) {
        (
            "Out of space" | "Space guaranteed" | "Out of metadata" | "Host: disk full",
            Code::OutOfRange,
        ) => "the resizer would retry indefinitely; this code lets the user lower the claim again",
        ("Host: program missing", Code::Internal) => {
            "the resizer takes FAILED_PRECONDITION for \"in use\" and would not retry"
        }
        ("Damaged", Code::Unavailable) => {
            "the record may belong to an object that an earlier attempt created, and after a final code the caller would forget it"
        }
        ("Bug", Code::Aborted) => {
            "it is unknown whether something was created, so the caller must not forget it"
        }
        other => panic!("no reason is given why {other:?} differs"),
    }
}

const HEAD: &str = "# Errors

A test renders this page from the code table (`src/service/status.rs`). To update it, run
`UPDATE_DOCS=1 cargo test --test unprivileged service::`.

Every error message is one sentence about the caller's object: what is wrong, which value was
found, and which values are allowed. `status.details` is empty, as CSI requires. The codes are
chosen by how the callers react:

| Code | external-provisioner (create) | csi-snapshotter, kubelet (stage, publish) | external-resizer |
|---|---|---|---|
| ABORTED 10, UNAVAILABLE 14 | may be in progress: retries, never forgets | the same | retries |
| RESOURCE_EXHAUSTED 8 | asks the scheduler for another node | retries | retries |
| INVALID_ARGUMENT 3, NOT_FOUND 5, OUT_OF_RANGE 11 | final: nothing is left | final | gives up: the claim can be lowered again |
| FAILED_PRECONDITION 9 | final: nothing is left | final | waits until no pod uses the claim |
| any other | final: nothing is left | final | retries |

Final means that the caller may forget the object without a delete, an unstage or an unpublish.
Therefore the driver returns a final code only if it is certain that nothing is left. Delete,
unstage, unpublish and detach are retried after every code.

## Conditions
";

fn render_conditions(page: &mut String) {
    for Condition {
        name,
        example,
        meaning,
    } in conditions()
    {
        let mut codes: BTreeMap<i32, Vec<Rpc>> = BTreeMap::new();
        for rpc in Rpc::ALL {
            codes
                .entry(code(*rpc, &example).into())
                .or_default()
                .push(*rpc);
        }
        let usual = *codes.iter().max_by_key(|(_, rpcs)| rpcs.len()).unwrap().0;
        let message = status(Rpc::CreateVolume, &example).message().to_string();
        let say = |code: i32| format!("{} {code}", code_name(code.into()));
        write!(
            page,
            "\n### {name}: {}\n\n> {message}\n\n{meaning}\n",
            say(usual)
        )
        .unwrap();
        for (code, rpcs) in codes.iter().filter(|(code, _)| **code != usual) {
            let rpcs: Vec<_> = rpcs.iter().map(|rpc| rpc.name()).collect();
            let (say, why) = (say(*code), exception(name, (*code).into()));
            write!(page, "\n{say} for {}: {why}.\n", rpcs.join(", ")).unwrap();
        }
    }
}

fn render_table(page: &mut String) {
    let conditions = conditions();
    page.push_str("\n## The whole table\n\n| Call |");
    for condition in &conditions {
        write!(page, " {} |", condition.name).unwrap();
    }
    write!(page, "\n|---|{}\n", "---|".repeat(conditions.len())).unwrap();
    // Calls with equal rows share one; most calls have the most common row.
    let mut rows: BTreeMap<Vec<i32>, Vec<&str>> = BTreeMap::new();
    for rpc in Rpc::ALL {
        let codes = conditions.iter().map(|c| code(*rpc, &c.example).into());
        rows.entry(codes.collect()).or_default().push(rpc.name());
    }
    let most = rows.values().map(Vec::len).max().unwrap();
    for (codes, calls) in rows {
        let calls = match calls.len() {
            n if n == most => "every other call".to_string(),
            _ => calls.join(", "),
        };
        let codes: Vec<_> = codes.iter().map(i32::to_string).collect();
        writeln!(page, "| {calls} | {} |", codes.join(" | ")).unwrap();
    }
}

async fn render_refusals(page: &mut String) {
    page.push_str(
        "\n## Invalid requests\n\nAll of them return INVALID_ARGUMENT 3; nothing was \
         changed.\n\n| Call | Given | Message |\n|---|---|---|\n",
    );
    let node = Node::start().await;
    for (what, call) in refusals::all() {
        let rpc = call.rpc();
        let message = call
            .send(&node)
            .await
            .unwrap_err()
            .message()
            .replace('|', "\\|");
        writeln!(page, "| {rpc} | {what} | {message} |").unwrap();
    }
    node.stop().await;
}

#[tokio::test]
#[expect(
    clippy::disallowed_methods,
    reason = "writes a page of the repository, on demand"
)]
async fn the_page_equals_the_table() {
    let mut page = HEAD.to_string();
    render_conditions(&mut page);
    render_refusals(&mut page).await;
    render_table(&mut page);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(PAGE);
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    for (written, page) in written.lines().zip(page.lines()) {
        assert_eq!(written, page, "{PAGE} is old: run with UPDATE_DOCS=1");
    }
    assert_eq!(
        written.len(),
        page.len(),
        "{PAGE} is old: run with UPDATE_DOCS=1"
    );
}

#[test]
fn every_condition_is_described_once() {
    let mut names: Vec<_> = conditions()
        .iter()
        .map(|condition| condition.name)
        .collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), NAMES);
    assert_eq!(conditions().len(), NAMES);
}

/// What the provisioner does with each code, as in its `checkError`.
#[test]
fn a_new_volume_is_never_forgotten_while_something_may_be_left() {
    let may_leave = [
        "Pending",
        "Group in doubt",
        "Busy",
        "Rollback failed",
        "Unreachable",
        "Stopping",
        "Damaged",
        "Host: no answer",
        "Bug",
    ];
    for condition in conditions() {
        for rpc in [
            Rpc::CreateVolume,
            Rpc::CreateSnapshot,
            Rpc::NodeStageVolume,
            Rpc::NodePublishVolume,
        ] {
            let kept = matches!(
                code(rpc, &condition.example),
                Code::Aborted | Code::Unavailable
            );
            if may_leave.contains(&condition.name) {
                assert!(kept, "{rpc}: {}", condition.name);
            } else {
                assert!(
                    !kept || condition.name == "Bad token",
                    "{rpc}: {}",
                    condition.name
                );
            }
        }
        let is_kept = may_leave.contains(&condition.name);
        assert_eq!(condition.example.is_final(), !is_kept, "{}", condition.name);
    }
    for code in 0..=16 {
        let message = String::new();
        let is_final = Error::Forwarded { code, message }.is_final();
        let code = Code::from_i32(code);
        let is_kept = matches!(
            code,
            Code::Cancelled | Code::DeadlineExceeded | Code::Aborted | Code::Unavailable
        );
        assert_eq!(is_final, !is_kept, "{code:?}");
    }
}

/// Growth that cannot succeed can be reverted. Growth that may succeed later is not given up.
#[test]
fn growth_beyond_the_free_space_can_be_reverted() {
    for condition in conditions() {
        for rpc in [Rpc::ControllerExpandVolume, Rpc::NodeExpandVolume] {
            let code = code(rpc, &condition.example);
            let never = [
                "Out of space",
                "Space guaranteed",
                "Host: disk full",
                "Host: file too large",
            ];
            assert!(!never.contains(&condition.name) || code == Code::OutOfRange);
            let waits = [
                "Pending",
                "Rollback failed",
                "Unreachable",
                "Stopping",
                "Host: no answer",
            ]
            .contains(&condition.name);
            assert!(!waits || matches!(code, Code::Aborted | Code::Unavailable));
        }
    }
}

#[test]
fn a_message_fits_into_a_header_whatever_was_given() {
    let long = "潮".repeat(1_000_000);
    let message = status(Rpc::DeleteVolume, &Error::no_volume(&long));
    assert!(message.message().len() < 4096);
    assert!(message.message().ends_with('…'));
}
