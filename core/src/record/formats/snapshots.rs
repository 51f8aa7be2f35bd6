//! Records of snapshots that earlier programs have written.

use super::check;
use super::records::{everything_asked, mounted, uuid};
use crate::model::{Allocation, FsType, Level, Wipe};
use crate::record::*;

pub(super) fn group() -> GroupMembership {
    GroupMembership {
        id: uuid(11),
        members: vec!["p.1".into(), "p.2".into()],
        sources: vec!["p.3".into(), "p.4".into()],
        asked: None,
        independent: false,
    }
}

pub(super) fn cut_snapshot() -> SnapshotRecord {
    SnapshotRecord {
        uuid: uuid(1),
        name: "snapshot-1".into(),
        incarnation: uuid(2),
        state: SnapshotState::Cut,
        attempt: uuid(3),
        source: uuid(4),
        source_incarnation: uuid(5),
        size: 1 << 30,
        block_size: 512,
        allocation: Allocation::Thin,
        formatted: Some(Formatted::complete(FormattedAs::Ext4, uuid(6))),
        capabilities: vec![mounted(FsType::Ext4, &[])],
        wipe: Wipe::Discard,
        cut_at: 1_700_000_000_000_000_001,
        level: Level::Filesystem,
        min_level: None,
        reason: String::new(),
        group: None,
        copy: None,
        lineage: None,
        base: None,
        for_clone: false,
        foreign_bytes: None,
        image: 0,
    }
}

#[test]
fn records_of_snapshots_keep_their_format() {
    let (group, cut) = (group(), cut_snapshot());
    let preparing = SnapshotRecord {
        state: SnapshotState::Preparing,
        cut_at: 0,
        level: Level::default(),
        ..cut.clone()
    };
    let degraded = SnapshotRecord {
        state: SnapshotState::Ready,
        allocation: Allocation::Thick,
        wipe: Wipe::Zero,
        level: Level::Crash,
        min_level: Some(Level::Application),
        reason: "the hook of default/data failed".into(),
        copy: Some(CopyProgress {
            copied: 1 << 20,
            source_modified: 1_700_000_001,
            base: None,
        }),
        lineage: Some(uuid(7)),
        ..cut.clone()
    };
    let member = |independent| SnapshotRecord {
        state: SnapshotState::Ready,
        level: Level::Application,
        group: Some(GroupMembership {
            asked: Some(everything_asked().to_string()),
            independent,
            ..group.clone()
        }),
        ..cut.clone()
    };
    let keeps_base = SnapshotRecord {
        state: SnapshotState::Ready,
        base: Some(Base::Keep),
        ..cut.clone()
    };
    let base = SnapshotRecord {
        state: SnapshotState::Preparing,
        base: Some(Base::Kept),
        ..cut.clone()
    };
    check(
        "snapshot",
        vec![
            ("preparing.json", preparing),
            (
                "ready.json",
                SnapshotRecord {
                    state: SnapshotState::Ready,
                    ..cut.clone()
                },
            ),
            (
                "member-of-an-old-group.json",
                SnapshotRecord {
                    group: Some(group.clone()),
                    ..cut.clone()
                },
            ),
            ("cut.json", cut.clone()),
            ("degraded-copy.json", degraded),
            ("member.json", member(false)),
            ("independent-member.json", member(true)),
            ("keeps-base.json", keeps_base),
            ("base.json", base),
        ],
    );
}

#[test]
fn records_of_snapshots_for_clones_keep_their_format() {
    let for_clone = SnapshotRecord {
        state: SnapshotState::Ready,
        for_clone: true,
        ..cut_snapshot()
    };
    check("snapshot", vec![("for-clone.json", for_clone)]);
}

#[test]
fn records_of_snapshots_of_imported_volumes_keep_their_format() {
    let shares = SnapshotRecord {
        foreign_bytes: Some(5 << 20),
        ..cut_snapshot()
    };
    let name = "shares-with-a-file-of-others.json";
    check("snapshot", vec![(name, shares)]);
}
