//! The acts of a test, chosen at random.

use nix::errno::Errno;
use proptest::prelude::*;
use slackwater::host::memory::{FaultMode, Unreadable};
use slackwater::model::{FsType, Level, Wipe};

use crate::simulation::{SIZE, Step, VolumeConfig};

/// Two names are enough to be confused; a third is for a volume created from one of them.
pub const NAMES: [&str; 3] = ["a", "b", "c"];
pub const INLINE: [&str; 2] = ["x", "y"];
pub const SNAPSHOTS: [&str; 2] = ["s", "t"];
pub const GROUPS: [&str; 2] = ["g", "h"];
const SOURCES: [&[&str]; 4] = [&["a", "b"], &["b", "c"], &["a", "b", "c"], &["c"]];

/// The next act.
#[derive(Clone, Debug)]
pub enum Act {
    Call(Step),
    /// Two callers at once.
    Pair(Step, Step),
    /// A call with a fault at its n-th effect. If the fault ends the process, the process starts
    /// again.
    Fault(Step, usize, FaultMode, After),
    Restart,
    Reboot(bool),
    /// Users write wherever they can, and sync their writes or not.
    Write(bool),
    /// A fault begins, and lasts.
    Begin(Kind),
    /// The fault ends.
    End,
}

/// A fault that lasts for many acts.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Full,
    /// The n-th of all existing records cannot be read, by a driver that was started before the
    /// fault or that starts now.
    Unreadable {
        n: usize,
        config: Unreadable,
        begins: bool,
    },
    /// The pool's disk is dead, and the driver has checked it since or not. At the end, it is
    /// mounted again, or answers again.
    Dead {
        remounted: bool,
        seen: bool,
    },
    /// The pool's disk hangs, and the driver has checked it since.
    Hangs,
}

/// The event after a fault.
#[derive(Clone, Copy, Debug)]
pub enum After {
    Nothing,
    Restart,
    PowerLoss,
}

fn configs() -> impl Strategy<Value = VolumeConfig> {
    let wipe = prop_oneof![Just(Wipe::None), Just(Wipe::Zero)];
    let config = prop_oneof![
        3 => Just(VolumeConfig::EXT4),
        1 => Just(VolumeConfig::fs(FsType::Xfs)),
        1 => Just(VolumeConfig::fs(FsType::Btrfs)),
        2 => Just(VolumeConfig::BLOCK),
        1 => Just(VolumeConfig::THICK),
    ];
    (config, wipe).prop_map(|(config, wipe)| config.wiped(wipe).of_pool())
}

/// Snapshots, groups, and volumes created from them.
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
        4 => (name(), snapshot(), configs(), 1..4u64)
            .prop_map(|(name, of, config, times)| Step::Restore(name, of, config, SIZE * times)),
        2 => (name(), configs(), 1..4u64)
            .prop_map(|(name, config, times)| Step::Receive(name, config, SIZE * times)),
        3 => (name(), name(), configs(), 1..4u64)
            .prop_map(|(name, of, config, times)| Step::Clone(name, of, config, SIZE * times)),
        4 => (group(), sources).prop_map(|(group, sources)| Step::Group(group, sources)),
        2 => group().prop_map(Step::DeleteGroup),
    ]
    // On the heap: the stack of a test is small.
    .boxed()
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![3 => volumes(), 2 => cuts()].boxed()
}

fn volumes() -> impl Strategy<Value = Step> {
    let name = || prop::sample::select(&NAMES[..]);
    let inline = || prop::sample::select(&INLINE[..]);
    let n = || 0..2u8;
    prop_oneof![
        4 => (name(), configs()).prop_map(|(name, config)| Step::Create(name, config)),
        3 => name().prop_map(Step::Delete),
        1 => (name(), configs()).prop_map(|(name, config)| Step::Modify(name, config.wipe)),
        1 => (name(), 1..4u64).prop_map(|(name, times)| Step::Expand(name, SIZE * times)),
        1 => name().prop_map(Step::NodeExpandVolume),
        5 => (name(), configs()).prop_map(|(name, config)| Step::StageAs(name, config)),
        3 => name().prop_map(Step::Unstage),
        4 => (name(), n(), any::<bool>(), configs())
            .prop_map(|(name, n, ro, config)| Step::PublishAs(name, n, ro, config)),
        3 => (name(), n()).prop_map(|(name, n)| Step::Unpublish(name, n)),
        2 => (inline(), configs()).prop_map(|(name, config)| {
            // A pod's specification never changes.
            let fs = if name == INLINE[0] { FsType::Ext4 } else { FsType::Xfs };
            Step::PublishInline(name, VolumeConfig { fs: config.fs.map(|_| fs), ..config })
        }),
        1 => inline().prop_map(Step::UnpublishInline),
    ]
    .boxed()
}

/// Either nothing, or volumes that are already in use.
pub fn prelude() -> impl Strategy<Value = Vec<Act>> {
    let config = prop_oneof![
        2 => Just(VolumeConfig::EXT4),
        1 => Just(VolumeConfig::fs(FsType::Xfs)),
        1 => Just(VolumeConfig::fs(FsType::Btrfs)),
        1 => Just(VolumeConfig::THICK.of_pool()),
        1 => Just(VolumeConfig::BLOCK),
    ];
    let used = |configs: [VolumeConfig; 3]| {
        let each = NAMES.into_iter().zip(configs);
        let steps = each.flat_map(|(name, config)| {
            // A raw device is written where it is published.
            let publish = (config.fs.is_none()).then_some(Step::PublishAs(name, 0, false, config));
            let staged = [Step::Create(name, config), Step::StageAs(name, config)];
            staged.into_iter().chain(publish)
        });
        let mut acts: Vec<Act> = steps.map(Act::Call).collect();
        acts.extend([Act::Write(true), Act::Write(false)]);
        acts
    };
    prop_oneof![
        Just(Vec::new()),
        [config.clone(), config.clone(), config].prop_map(used),
    ]
}

fn kinds() -> impl Strategy<Value = Kind> {
    let config = prop_oneof![Just(Unreadable::Error), Just(Unreadable::Zeros)];
    let unreadable = (0..8usize, config, any::<bool>())
        .prop_map(|(n, config, begins)| Kind::Unreadable { n, config, begins });
    let dead = any::<(bool, bool)>().prop_map(|(remounted, seen)| Kind::Dead { remounted, seen });
    prop_oneof![
        2 => Just(Kind::Full),
        3 => unreadable,
        3 => dead,
        2 => Just(Kind::Hangs),
    ]
}

/// One act, or several related acts.
pub fn acts() -> impl Strategy<Value = Vec<Act>> {
    prop_oneof![
        30 => each().prop_map(|act| vec![act]),
        1 => kinds().prop_map(|kind| vec![Act::Begin(kind)]),
        2 => Just(vec![Act::End]),
        2 => twice(),
    ]
}

/// A call that fails, others that succeed, and another that fails, all on the same volume or
/// snapshot.
fn twice() -> impl Strategy<Value = Vec<Act>> {
    let n = || 1..16usize;
    let mode = || {
        let eio = [FaultMode::Before(Errno::EIO), FaultMode::After(Errno::EIO)];
        prop::sample::select(eio.to_vec())
    };
    let fault = |step, n, mode| Act::Fault(step, n, mode, After::Nothing);
    let growth = (
        prop::sample::select(&NAMES[..]),
        configs(),
        2..6u64,
        2..6u64,
    );
    let growth = growth.prop_map(|(name, config, one, other)| {
        let between = vec![Act::Call(Step::StageAs(name, config)), Act::Write(true)];
        (
            Step::Expand(name, SIZE * one),
            between,
            Step::Expand(name, SIZE * other),
        )
    });
    let same = (steps(), steps());
    let same = same
        .prop_map(|(step, other)| (step.clone(), vec![Act::Call(other), Act::Write(true)], step));
    let calls = prop_oneof![growth, same];
    (calls, n(), mode(), n(), mode()).prop_map(
        move |((one, between, other), n, config, m, again)| {
            let (first, last) = (fault(one, n, config), fault(other, m, again));
            std::iter::once(first)
                .chain(between)
                .chain([last])
                .collect()
        },
    )
}

fn each() -> impl Strategy<Value = Act> {
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
