//! Format tests of the records that are stored with the data, and of the node's record.

use std::time::Duration;

use uuid::Uuid;

use super::{check, check_with};
use crate::model::snapshot::{Members, OnQuiesceFailure, SharedVolume, SnapshotParameters};
use crate::model::{
    AccessMode, AccessType, Allocation, Capability, FsType, HomeId, Level, PoolId,
    SnapshotSpacePolicy, Wipe,
};
use crate::record::node::KnownPool;
use crate::record::*;

pub(super) fn uuid(n: u128) -> Uuid {
    Uuid::from_u128(n)
}

pub(super) fn mounted(fs: FsType, flags: &[&str]) -> Capability {
    Capability {
        access_type: AccessType::Mount {
            fs_type: Some(fs),
            mount_flags: flags.iter().map(|flag| flag.to_string()).collect(),
        },
        access_mode: AccessMode::SingleNodeMultiWriter,
    }
}

fn block(access_mode: AccessMode) -> Capability {
    Capability {
        access_type: AccessType::Block,
        access_mode,
    }
}

pub(super) fn volume() -> VolumeRecord {
    VolumeRecord {
        uuid: uuid(1),
        name: "pvc-1".into(),
        incarnation: uuid(2),
        state: VolumeState::Creating,
        size: 1 << 30,
        allocation: Allocation::Thin,
        block_size: 512,
        asked_block_size: None,
        mkfs_options: Vec::new(),
        wipe: Wipe::Discard,
        created_wipe: Wipe::Discard,
        block_groups: true,
        capabilities: vec![mounted(FsType::Ext4, &[])],
        formatted: None,
        ephemeral: false,
        last_stage: None,
        created_at: 1_700_000_000,
        content_source: None,
        claim: None,
        copy: None,
        growth: None,
        lineage: None,
        image: 0,
        fenced: None,
        lifted: None,
        imported: None,
        foreign_bytes: None,
        reverting: None,
        reverted: None,
        spare: None,
    }
}

/// Parameters of a VolumeGroupSnapshotClass in which no value is the default.
pub(super) fn everything_asked() -> SnapshotParameters {
    SnapshotParameters {
        consistency: Level::Application,
        on_quiesce_failure: OnQuiesceFailure::Degrade(Level::Crash),
        freeze_timeout: Duration::from_millis(1500),
        quiesce_timeout: Duration::from_secs(20),
        retries: 3,
        retry_interval: Duration::from_secs(7),
        shared_volume: SharedVolume::Skip,
        max_extents: Some(1000),
        members: Members::Independent,
        keep_base: false,
        is_of_object: true,
        for_clone: false,
    }
}

/// A repeated group call is compared with the original request by this text.
#[test]
fn the_request_of_a_group_keeps_its_text() {
    let shared = [
        ("all", SharedVolume::All),
        ("one", SharedVolume::One),
        ("skip", SharedVolume::Skip),
        ("fail", SharedVolume::Fail),
    ];
    let mut expected: Vec<_> = shared
        .iter()
        .map(|(name, shared_volume)| {
            let parameters = SnapshotParameters {
                shared_volume: *shared_volume,
                ..SnapshotParameters::default()
            };
            (*name, parameters.to_string())
        })
        .collect();
    expected.push(("everything", everything_asked().to_string()));
    let read = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    check_with("asked", expected, read, |text| text.clone().into_bytes());
}

pub(super) fn ready_volume() -> VolumeRecord {
    VolumeRecord {
        state: VolumeState::Ready,
        ..volume()
    }
}

fn volume_with_every_field() -> VolumeRecord {
    VolumeRecord {
        allocation: Allocation::Thick,
        block_size: 4096,
        asked_block_size: Some(4096),
        mkfs_options: vec!["-i".into(), "16384".into()],
        wipe: Wipe::Zero,
        created_wipe: Wipe::Discard,
        capabilities: vec![mounted(FsType::Xfs, &["noatime", "discard"])],
        formatted: Some(Formatted::complete(FormattedAs::Xfs, uuid(3))),
        last_stage: Some(LastStage {
            staging_path: "/var/lib/kubelet/plugins/kubernetes.io/csi/x/globalmount".into(),
            capability: mounted(FsType::Xfs, &["noatime"]),
            boot: None,
        }),
        content_source: Some(ContentSource::Snapshot(format!("{}.{}", uuid(4), uuid(5)))),
        claim: Some("default/data".into()),
        copy: Some(CopyProgress {
            copied: 64 << 20,
            source_modified: 1_700_000_001,
            base: None,
        }),
        lineage: Some(uuid(6)),
        ..ready_volume()
    }
}

fn growing_thick_volume() -> VolumeRecord {
    VolumeRecord {
        allocation: Allocation::Thick,
        growth: Some(GrowthProgress {
            end: 3 << 30,
            written: 2 << 30,
        }),
        ..ready_volume()
    }
}

/// Volumes with each kind of content.
fn formatted_volumes() -> Vec<(&'static str, VolumeRecord)> {
    let ready = ready_volume();
    let begun = Formatted::begun(FormattedAs::Ext4, uuid(3));
    let readers = Capability {
        access_mode: AccessMode::MultiNodeReaderOnly,
        ..mounted(FsType::Btrfs, &[])
    };
    let modes = [
        AccessMode::SingleNodeWriter,
        AccessMode::SingleNodeReaderOnly,
        AccessMode::SingleNodeSingleWriter,
        AccessMode::SingleNodeMultiWriter,
    ];
    vec![
        (
            "format-begun.json",
            VolumeRecord {
                formatted: Some(begun.clone()),
                ..ready.clone()
            },
        ),
        (
            "growing.json",
            VolumeRecord {
                formatted: Some(Formatted {
                    complete: true,
                    growing: true,
                    ..begun
                }),
                ..ready.clone()
            },
        ),
        (
            "found-on-raw.json",
            VolumeRecord {
                formatted: Some(Formatted {
                    found: true,
                    ..Formatted::complete(FormattedAs::Btrfs, uuid(3))
                }),
                ..ready.clone()
            },
        ),
        (
            "raw-staged.json",
            VolumeRecord {
                capabilities: modes.map(block).to_vec(),
                formatted: Some(Formatted::raw()),
                last_stage: Some(LastStage {
                    staging_path: "/staging".into(),
                    capability: block(AccessMode::SingleNodeWriter),
                    boot: Some(uuid(7)),
                }),
                ..ready.clone()
            },
        ),
        (
            "for-readers.json",
            VolumeRecord {
                content_source: Some(ContentSource::Snapshot("a.b".into())),
                capabilities: vec![readers],
                ..ready.clone()
            },
        ),
    ]
}

#[test]
fn records_of_volumes_keep_their_format() {
    let ready = ready_volume();
    let full = volume_with_every_field();
    let mut expected = vec![
        ("creating.json", volume()),
        ("ready.json", ready.clone()),
        (
            "inline.json",
            VolumeRecord {
                ephemeral: true,
                ..ready.clone()
            },
        ),
        (
            "clone.json",
            VolumeRecord {
                content_source: Some(ContentSource::Volume("a.b".into())),
                ..volume()
            },
        ),
        ("every-field.json", full),
        (
            "mixture.json",
            VolumeRecord {
                copy: Some(CopyProgress {
                    copied: 64 << 20,
                    source_modified: CopyProgress::beside(8),
                    base: Some(7),
                }),
                ..volume()
            },
        ),
        (
            "shares-with-a-file-of-others.json",
            VolumeRecord {
                imported: Some(7),
                foreign_bytes: Some(5 << 20),
                ..ready.clone()
            },
        ),
        (
            "no-block-groups.json",
            VolumeRecord {
                block_groups: false,
                ..ready
            },
        ),
    ];
    expected.push(("reserving-growth.json", growing_thick_volume()));
    let fenced = VolumeRecord {
        fenced: Some(uuid(8)),
        ..ready_volume()
    };
    expected.push(("fenced.json", fenced));
    let lifted = VolumeRecord {
        lifted: Some(uuid(8)),
        ..ready_volume()
    };
    expected.push(("fence-lifted.json", lifted));
    expected.extend(reverted_volumes());
    expected.extend(formatted_volumes());
    check("volume", expected);
}

/// A revert whose volume has its new image.
pub(super) fn reverting() -> Reverting {
    Reverting {
        uid: uuid(8),
        name: "shop/back".into(),
        snapshot: uuid(9),
        incarnation: uuid(10),
        members: None,
        members_digest: None,
        spare: uuid(11),
        is_switched: true,
        image: 7,
    }
}

fn reverted_volumes() -> [(&'static str, VolumeRecord); 5] {
    let reverting = reverting();
    let reverted = Reverted {
        uid: uuid(12),
        is_done: true,
        number: 3,
    };
    let spare = Spare {
        of: uuid(1),
        is_whole: true,
    };
    let of_group = VolumeRecord {
        reverting: Some(Reverting {
            members: Some(3),
            ..reverting.clone()
        }),
        ..ready_volume()
    };
    let of_these = VolumeRecord {
        reverting: Some(Reverting {
            members: Some(3),
            members_digest: Some(uuid(13)),
            ..reverting.clone()
        }),
        ..ready_volume()
    };
    let fenced = VolumeRecord {
        reverting: Some(reverting),
        ..ready_volume()
    };
    let ended = VolumeRecord {
        reverted: Some(reverted),
        ..ready_volume()
    };
    let whole = VolumeRecord {
        state: VolumeState::Creating,
        spare: Some(spare),
        ..ready_volume()
    };
    [
        ("reverting.json", fenced),
        ("reverting-group.json", of_group),
        ("reverting-these.json", of_these),
        ("reverted.json", ended),
        ("spare.json", whole),
    ]
}

#[test]
fn the_records_of_pools_and_of_the_node_keep_their_format() {
    let pool = PoolRecord {
        id: PoolId(uuid(1)),
        home: HomeId(uuid(2)),
        name: "fast".into(),
        created_at: 1_700_000_000,
        snapshots: None,
    };
    let with = |snapshots| PoolRecord {
        snapshots: Some(snapshots),
        ..pool.clone()
    };
    let reserved = with(SnapshotSpacePolicy::Reserved);
    let best_effort = with(SnapshotSpacePolicy::BestEffort);
    check(
        "pool",
        vec![
            ("pool.json", pool),
            ("reserved.json", reserved),
            ("best-effort.json", best_effort),
        ],
    );
    let image = |formatted| ImageRecord {
        size: 10 << 30,
        block_size: 4096,
        formatted,
        created_at: 1_700_000_000,
    };
    let begun = Formatted::begun(FormattedAs::Xfs, uuid(1));
    let complete = Formatted::complete(FormattedAs::Xfs, uuid(1));
    check(
        "image",
        vec![
            ("begun.json", image(begun)),
            ("complete.json", image(complete)),
        ],
    );
    let known = |name: &str| KnownPool {
        name: name.into(),
        place: format!("file:/srv/{name}"),
    };
    let node = NodeRecord {
        home: Some(HomeId(uuid(2))),
        pools: [(PoolId(uuid(1)), known("fast"))].into(),
        forgotten: [(PoolId(uuid(3)), known("old"))].into(),
    };
    check(
        "node",
        vec![("empty.json", NodeRecord::default()), ("node.json", node)],
    );
}
