//! What may happen, drawn at random.

use nix::errno::Errno;
use proptest::prelude::*;
use slackwater::host::memory::FaultMode;
use slackwater::model::{FsType, Level, Wipe};

use crate::world::{How, SIZE, Step};

/// Two are enough to be mixed up, and a third to be made of one of them.
pub const NAMES: [&str; 3] = ["a", "b", "c"];
pub const INLINE: [&str; 2] = ["x", "y"];
pub const SNAPSHOTS: [&str; 2] = ["s", "t"];
pub const GROUPS: [&str; 2] = ["g", "h"];
const SOURCES: [&[&str]; 4] = [&["a", "b"], &["b", "c"], &["a", "b", "c"], &["c"]];

/// What happens next.
#[derive(Clone, Debug)]
pub enum Act {
    Call(Step),
    /// Two callers at once.
    Pair(Step, Step),
    /// A call with a fault at its n-th effect; if that ends the process, it starts again.
    Fault(Step, usize, FaultMode, After),
    Restart,
    Reboot(bool),
    /// Users write wherever they can, and sync it or not.
    Write(bool),
}

/// What comes after a fault.
#[derive(Clone, Copy, Debug)]
pub enum After {
    Nothing,
    Restart,
    PowerLoss,
}

fn hows() -> impl Strategy<Value = How> {
    let wipe = prop_oneof![Just(Wipe::None), Just(Wipe::Zero)];
    let how = prop_oneof![
        3 => Just(How::EXT4),
        1 => Just(How::fs(FsType::Xfs)),
        1 => Just(How::fs(FsType::Btrfs)),
        2 => Just(How::BLOCK),
        1 => Just(How::THICK),
    ];
    (how, wipe).prop_map(|(how, wipe)| how.wiped(wipe))
}

/// Snapshots, groups, and volumes made of them.
fn cuts() -> impl Strategy<Value = Step> {
    let name = || prop::sample::select(&NAMES[..]);
    let snapshot = || prop::sample::select(&SNAPSHOTS[..]);
    let group = || prop::sample::select(&GROUPS[..]);
    let sources = prop::sample::select(&SOURCES[..]);
    let level = prop_oneof![3 => Just(Level::Filesystem), 1 => Just(Level::Crash)];
    prop_oneof![
        5 => (snapshot(), name(), level)
            .prop_map(|(snapshot, name, level)| Step::Snapshot(snapshot, name, level)),
        2 => snapshot().prop_map(Step::DeleteSnapshot),
        4 => (name(), snapshot(), hows(), 1..4u64)
            .prop_map(|(name, of, how, times)| Step::Restore(name, of, how, SIZE * times)),
        3 => (name(), name(), hows(), 1..4u64)
            .prop_map(|(name, of, how, times)| Step::Clone(name, of, how, SIZE * times)),
        4 => (group(), sources).prop_map(|(group, sources)| Step::Group(group, sources)),
        2 => group().prop_map(Step::DeleteGroup),
    ]
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![3 => volumes(), 2 => cuts()]
}

fn volumes() -> impl Strategy<Value = Step> {
    let name = || prop::sample::select(&NAMES[..]);
    let inline = || prop::sample::select(&INLINE[..]);
    let n = || 0..2u8;
    prop_oneof![
        4 => (name(), hows()).prop_map(|(name, how)| Step::Create(name, how)),
        3 => name().prop_map(Step::Delete),
        1 => (name(), prop_oneof![Just(Wipe::None), Just(Wipe::Zero)])
            .prop_map(|(name, wipe)| Step::Modify(name, wipe)),
        1 => (name(), 1..4u64).prop_map(|(name, times)| Step::Expand(name, SIZE * times)),
        1 => name().prop_map(Step::ExpandNode),
        5 => (name(), hows()).prop_map(|(name, how)| Step::StageAs(name, how)),
        3 => name().prop_map(Step::Unstage),
        4 => (name(), n(), any::<bool>(), hows())
            .prop_map(|(name, n, ro, how)| Step::PublishAs(name, n, ro, how)),
        3 => (name(), n()).prop_map(|(name, n)| Step::Unpublish(name, n)),
        2 => (inline(), hows()).prop_map(|(name, how)| {
            // A pod's specification never changes.
            let fs = if name == INLINE[0] { FsType::Ext4 } else { FsType::Xfs };
            Step::PublishInline(name, How { fs: how.fs.map(|_| fs), ..how })
        }),
        1 => inline().prop_map(Step::UnpublishInline),
    ]
}

/// Nothing, or volumes that are in use already.
pub fn prelude() -> impl Strategy<Value = Vec<Act>> {
    let how = prop_oneof![
        2 => Just(How::EXT4),
        1 => Just(How::fs(FsType::Xfs)),
        1 => Just(How::fs(FsType::Btrfs)),
        1 => Just(How::THICK),
    ];
    let used = |hows: [How; 3]| {
        let each = NAMES.into_iter().zip(hows);
        let steps =
            each.flat_map(|(name, how)| [Step::Create(name, how), Step::StageAs(name, how)]);
        let mut acts: Vec<Act> = steps.map(Act::Call).collect();
        acts.extend([Act::Write(true), Act::Write(false)]);
        acts
    };
    prop_oneof![
        Just(Vec::new()),
        [how.clone(), how.clone(), how].prop_map(used),
    ]
}

pub fn acts() -> impl Strategy<Value = Act> {
    let mode = prop_oneof![
        Just(FaultMode::Before(Errno::EIO)),
        Just(FaultMode::After(Errno::EIO)),
        Just(FaultMode::CrashBefore),
        Just(FaultMode::CrashAfter),
    ];
    let after = prop_oneof![
        Just(After::Nothing),
        Just(After::Restart),
        Just(After::PowerLoss)
    ];
    prop_oneof![
        12 => steps().prop_map(Act::Call),
        3 => (steps(), steps()).prop_map(|(one, other)| Act::Pair(one, other)),
        4 => (steps(), 1..24usize, mode, after)
            .prop_map(|(step, n, mode, after)| Act::Fault(step, n, mode, after)),
        2 => (cuts(), 1..48usize)
            .prop_map(|(step, n)| Act::Fault(step, n, FaultMode::Thaw, After::Nothing)),
        1 => Just(Act::Restart),
        1 => any::<bool>().prop_map(Act::Reboot),
        4 => any::<bool>().prop_map(Act::Write),
    ]
}
