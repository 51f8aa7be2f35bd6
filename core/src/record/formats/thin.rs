//! Records of thin pools that earlier programs have written, each of which names its thin device, and
//! the record about LVM.

use super::check;
use super::records::{ready_volume, reverting, uuid, volume};
use super::snapshots::{cut_snapshot, group};
use crate::model::Level;
use crate::record::*;

#[test]
fn records_of_volumes_of_thin_pools_keep_their_format() {
    let on_device = |image, record: VolumeRecord| VolumeRecord { image, ..record };
    let ready = on_device(5, ready_volume());
    let begun = Formatted::begun(FormattedAs::Ext4, uuid(3));
    let growing = VolumeRecord {
        formatted: Some(Formatted {
            complete: true,
            growing: true,
            ..begun
        }),
        ..ready.clone()
    };
    let fenced = VolumeRecord {
        fenced: Some(uuid(8)),
        ..ready.clone()
    };
    let prepared = VolumeRecord {
        reverting: Some(Reverting {
            is_switched: false,
            image: 0,
            ..reverting()
        }),
        ..ready.clone()
    };
    // The volume has the device of its spare, and the revert names the former one.
    let switched = VolumeRecord {
        image: 8,
        reverting: Some(Reverting {
            image: 5,
            ..reverting()
        }),
        ..ready.clone()
    };
    let reverted = VolumeRecord {
        reverted: Some(Reverted {
            uid: uuid(12),
            is_done: true,
            number: 3,
        }),
        ..ready.clone()
    };
    let spare = |is_whole| VolumeRecord {
        spare: Some(Spare {
            of: uuid(1),
            is_whole,
        }),
        ..on_device(8, volume())
    };
    let expected = vec![
        ("thin-device-creating.json", on_device(5, volume())),
        ("thin-device.json", ready),
        ("thin-device-growing.json", growing),
        ("thin-device-fenced.json", fenced),
        ("thin-device-reverting.json", prepared),
        ("thin-device-switched.json", switched),
        ("thin-device-reverted.json", reverted),
        ("thin-device-begun-spare.json", spare(false)),
        ("thin-device-spare.json", spare(true)),
    ];
    check("volume", expected);
}

#[test]
fn records_of_snapshots_of_thin_pools_keep_their_format() {
    let cut = SnapshotRecord {
        image: 6,
        ..cut_snapshot()
    };
    let ready = SnapshotRecord {
        state: SnapshotState::Ready,
        ..cut.clone()
    };
    let preparing = SnapshotRecord {
        state: SnapshotState::Preparing,
        cut_at: 0,
        level: Level::default(),
        ..cut.clone()
    };
    let member = SnapshotRecord {
        group: Some(group()),
        ..ready.clone()
    };
    let base = SnapshotRecord {
        state: SnapshotState::Preparing,
        base: Some(Base::Kept),
        ..cut.clone()
    };
    let expected = vec![
        ("thin-device-preparing.json", preparing),
        ("thin-device-cut.json", cut),
        ("thin-device.json", ready),
        ("thin-device-member.json", member),
        ("thin-device-base.json", base),
    ];
    check("snapshot", expected);
}

#[test]
fn records_of_the_filter_of_lvm_keep_their_format() {
    let checked_at = 1_700_000_000;
    let record = LvmFilterRecord { checked_at };
    check("lvm-filter", vec![("checked.json", record)]);
}
