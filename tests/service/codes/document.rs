//! `docs/errors.md`, made of the table itself.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use nix::errno::Errno;
use slackwater::error::{Error, HostCause, HostError, Kind, Mismatch};
use slackwater::service::status::{code, code_name};
use slackwater::service::{Rpc, status};
use tonic::Code;

use crate::harness::Node;
use crate::refusals;

const PAGE: &str = "docs/errors.md";

/// A condition: its name here, an example, and what callers do about it.
struct Condition {
    name: &'static str,
    example: Error,
    meaning: &'static str,
}

/// One variant, one name. What is new must be named here, and described below.
fn name_of(error: &Error) -> &'static str {
    match error {
        Error::Invalid { .. } => "Invalid",
        Error::NotFound { .. } => "Not found",
        Error::Exists { .. } => "Exists",
        Error::Pending { .. } => "Pending",
        Error::Unsettled { .. } => "Unsettled",
        Error::InUse { .. } => "In use",
        Error::Refused { .. } | Error::Locked { .. } => "Refused",
        Error::Busy { .. } => "Busy",
        Error::OutOfSpace { .. } => "Out of space",
        Error::Promised { .. } => "Promised",
        Error::OutOfRange { .. } => "Out of range",
        Error::ElsewhereOnly { .. } => "Elsewhere only",
        Error::BadToken { .. } => "Bad token",
        Error::Unreachable { .. } => "Unreachable",
        Error::Unsupported { .. } => "Unsupported",
        Error::Damaged { .. } => "Damaged",
        Error::Host { .. } if error.is_no_space() => "Host: disk full",
        Error::Host { source, .. } if source.is_too_large() => "Host: file too large",
        Error::Host { source, .. } => match source.cause {
            HostCause::Missing { .. } => "Host: program missing",
            HostCause::NoAnswer => "Host: no answer",
            HostCause::Errno(_) | HostCause::Tool { .. } | HostCause::Unexpected(_) => "Host",
        },
        Error::Undo { .. } => "Undo",
        Error::QuiesceFailed { .. } => "Quiesce failed",
        Error::CutLost { .. } => "Cut lost",
        Error::Paused { .. } => "Paused",
        Error::Answered { .. } => "Answered",
        Error::Stopping => "Stopping",
        Error::Bug { .. } => "Bug",
    }
}

/// How many names [`name_of`] has.
const NAMES: usize = 28;

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
                "\"ntfs\" is not known; give ext4, xfs, btrfs, or nothing for ext4",
            ),
            "The request is wrong in itself and nothing was changed. Correct the class, the claim or the caller; a repeat gets the same answer. The resizer marks a modification as infeasible.",
        ),
        of(
            Error::no_volume(VOLUME),
            "The pool that would have it was asked, and it isn't there. Deletes, unstage, unpublish and detach of what isn't there are OK instead.",
        ),
        of(
            Error::Exists {
                kind: Kind::Volume,
                id: "\"pvc-7\"".into(),
                mismatch: Mismatch {
                    field: "capacity_bytes",
                    found: "1073741824".into(),
                    wanted: "2147483648 to any".into(),
                },
            },
            "The name or path is taken by something with other attributes; the first difference is named. Nothing was changed.",
        ),
        of(
            Error::Pending {
                what: format!("volume {VOLUME}"),
            },
            "An earlier call still runs. Callers repeat the call; it meets the result.",
        ),
        of(
            Error::Unsettled {
                group: "0c1d...9f".into(),
                reason: "the agent of node node-b is not served now: it does not answer".into(),
            },
            "A member of a group can't be deleted as long as a node has one that is neither committed nor undone. Callers repeat; it goes once that node answers.",
        ),
        of(
            Error::InUse {
                id: VOLUME.into(),
                holder: "staged at /var/lib/kubelet/...; unstage it first".into(),
            },
            "Somebody holds the volume, and is named. Provisioner and kubelet repeat until it is free; the resizer waits until no pod uses the claim.",
        ),
        of(
            Error::refused(
                format!("volume {VOLUME}"),
                "it was published as a raw block device before, and is never formatted",
            ),
            "The volume is in a state in which this must not be done; the sentence says the way out.",
        ),
        of(
            Error::Busy {
                subject: format!("volume {VOLUME}"),
                holder: "/dev/loop7 stands on its image".into(),
            },
            "Something that isn't this driver's holds the image for the moment. Callers repeat; nothing of it is touched.",
        ),
        of(
            Error::OutOfSpace {
                pool: "default".into(),
                required: 2 << 30,
                available: 1 << 30,
            },
            "A new volume is scheduled to another node where the claim lets it; other calls are repeated until there is room.",
        ),
        of(
            Error::Promised {
                pool: "default".into(),
                promised: 8 << 30,
                room: 7 << 30,
            },
            "Only snapshots: no one was made. It is repeated until it fits.",
        ),
        of(
            Error::OutOfRange {
                field: "capacity_range.limit_bytes".into(),
                problem: "104857600 is below the 314572800 bytes that this kind of volume needs"
                    .into(),
            },
            "No size within the range is possible. The user can change the claim; growth that is infeasible can be taken back.",
        ),
        of(
            Error::ElsewhereOnly {
                home: "0b5c...77".into(),
            },
            "The claim may only be on other nodes. The provisioner asks the scheduler for another node.",
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
                reason: "/disks/fast has no pool, but this machine had it; is its disk mounted?"
                    .into(),
            },
            "Nobody can say whether the object exists until the pool is back. Callers repeat; nothing is forgotten.",
        ),
        of(
            Error::Unsupported {
                what: "ControllerGetVolume, an alpha part of CSI, without --alpha get-volume,"
                    .into(),
            },
            "Callers that read the capabilities don't ask.",
        ),
        of(
            Error::Damaged {
                path: "/pool/volumes/8a27...3d/record.json".into(),
                problem: "not a record of a volume: expected value at line 1 column 1".into(),
            },
            "The record can't be understood, and is left as it is for an administrator. Callers repeat.",
        ),
        of(
            host("grow", errno(Errno::EIO)),
            "The kernel or a program refused; what had been done is undone, durably. The provisioner may forget the volume: nothing is left of it. A claim that still exists is tried again.",
        ),
        of(host("create", errno(Errno::ENOSPC)), "As out of space."),
        of(
            host("grow", errno(Errno::EFBIG)),
            "As out of range: the pool's file system has no files of that length (ext4: 16 TiB), however much room it has. Nothing is left.",
        ),
        of(
            host("format", missing),
            "Install the package, or use another file system. Nothing is left.",
        ),
        of(
            host(
                "find the loop devices of",
                HostError::no_answer("ask for the image of", "/dev/loop7"),
            ),
            "A disk or server beneath hangs, and what was asked can't be known. Callers repeat; nothing is forgotten.",
        ),
        of(
            Error::Undo {
                first: Box::new(host("create", errno(Errno::EIO))),
                undo: "remove /pool/volumes/8a27...3d: EIO".into(),
            },
            "Something is left, and the caller must not forget it: a repeat or the next start of the driver removes it.",
        ),
        of(
            Error::QuiesceFailed {
                hook: "orders-db".into(),
                reason: "it ended with exit status: 2 before it said READY: FATAL: the database system is starting up".into(),
            },
            "No snapshot was made, in no try, and the class allows no lower level (`onQuiesceFailure`). The hook's program, or its application, is to be looked at. The snapshotter repeats, and meets \"paused\".",
        ),
        of(
            Error::CutLost {
                reason: format!("the file system of volume {VOLUME} was thawed before it was cut"),
            },
            "No snapshot was made: what was copied is not proven to be of one moment. If it happens again, raise `freezeTimeout`, or find who else thaws.",
        ),
        of(
            Error::Paused {
                seconds: 118,
                sets: 2,
                last: Error::QuiesceFailed {
                    hook: "orders-db".into(),
                    reason: "it did not say READY within 30 s".into(),
                }
                .into(),
            },
            "The recorded failure, with its own code: callers repeat for ever, and neither the application nor its file system is touched for 1, then 2, 4 ... 30 minutes. Another name is tried at once.",
        ),
        of(
            Error::Answered {
                code: Code::ResourceExhausted as i32,
                message: "pool default has 0 bytes available, 1073741824 are needed".into(),
            },
            "What the agent of a node has answered to the cluster's router, which passes sentence and code on as they are; here a full pool.",
        ),
        of(
            Error::Stopping,
            "The driver is being stopped. Callers repeat, and meet the next one.",
        ),
        of(
            Error::Bug {
                invariant: "an operation ends without a panic".into(),
            },
            "A defect of this driver: please report it. What it left behind is found by a repeat or the next start.",
        ),
    ]
}

/// Why a code differs from that of the other calls.
fn exception(condition: &str, code: Code) -> &'static str {
    match (condition, code) {
        ("Out of space" | "Promised" | "Host: disk full", Code::OutOfRange) => {
            "growth would be repeated for ever; this lets the user lower the claim again"
        }
        ("Host: program missing", Code::Internal) => {
            "FAILED_PRECONDITION would mean \"in use\" there, and would not be repeated"
        }
        ("Damaged", Code::Unavailable) => {
            "the record may be that of what an earlier try made, and a final code would have it forgotten"
        }
        ("Bug", Code::Aborted) => {
            "nobody knows whether something was made, so it must not be forgotten"
        }
        other => panic!("say why {other:?} differs"),
    }
}

const HEAD: &str = "# Errors

This page is rendered from the code table (`src/service/status.rs`) by a test; write it anew with
`UPDATE_DOCS=1 cargo test --test service`.

Every refusal is one sentence about the caller's object: what is wrong, what was found, what would
be right. `status.details` is empty, as CSI demands. The codes are chosen by what the callers do:

| Code | external-provisioner (create) | csi-snapshotter, kubelet (stage, publish) | external-resizer |
|---|---|---|---|
| ABORTED 10, UNAVAILABLE 14 | may be in progress: repeats, never forgets | the same | repeats |
| RESOURCE_EXHAUSTED 8 | asks the scheduler for another node | repeats | repeats |
| INVALID_ARGUMENT 3, NOT_FOUND 5, OUT_OF_RANGE 11 | final: nothing is left | final | gives up: the claim can be lowered again |
| FAILED_PRECONDITION 9 | final: nothing is left | final | waits until no pod uses the claim |
| any other | final: nothing is left | final | repeats |

Final means that the object may be forgotten without a delete, an unstage or an unpublish. So a
final code is given only where it's certain that nothing is left. Deletes, unstage, unpublish and
detach are repeated after every code.

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
    // Calls with the same row share it; most calls have the most common one.
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
        "\n## Requests that are wrong in themselves\n\nAll of them INVALID_ARGUMENT 3; nothing was \
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
async fn the_page_is_the_table() {
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

/// What the provisioner does with each code, as its `checkError` has it.
#[test]
fn a_new_volume_is_never_forgotten_while_something_may_be_left() {
    let may_leave = [
        "Pending",
        "Unsettled",
        "Busy",
        "Undo",
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
    }
}

/// Growth that can't succeed can be taken back; one that waits is not given up.
#[test]
fn growth_beyond_the_room_can_be_taken_back() {
    for condition in conditions() {
        for rpc in [Rpc::ControllerExpandVolume, Rpc::NodeExpandVolume] {
            let code = code(rpc, &condition.example);
            let never = [
                "Out of space",
                "Promised",
                "Host: disk full",
                "Host: file too large",
            ];
            assert!(!never.contains(&condition.name) || code == Code::OutOfRange);
            let waits = [
                "Pending",
                "Undo",
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
