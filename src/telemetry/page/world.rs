//! What a status page is computed from: values that a router has in memory or reads from objects.

use std::pin::Pin;

use jiff::Timestamp;

/// A router as the source of a status page.
pub trait Source: Send + Sync + 'static {
    /// The present state. What cannot be read is reported in it.
    fn world(&self) -> Pin<Box<dyn Future<Output = World> + Send + '_>>;
}

/// The state of a cluster as a router has it.
#[derive(Clone, Debug)]
pub struct World {
    pub now: Timestamp,
    /// The name of the driver.
    pub driver: String,
    /// The namespace of the router and the agents.
    pub namespace: String,
    /// The pod of this router.
    pub router: String,
    /// Why objects may be outdated or missing.
    pub problem: Option<String>,
    /// All Pool objects.
    pub pools: Vec<Pool>,
    pub agents: Vec<Agent>,
    /// The PersistentVolumes that are bound to a claim.
    pub claims: Vec<Claim>,
    /// `None` if this installation executes no schedules.
    pub schedules: Option<Vec<Schedule>>,
    pub cuts: Cuts,
    /// Moves, reverts, evacuations, claims that are filled from data sources, and copies that are no part of
    /// these, which have not ended.
    pub work: Vec<Work>,
    /// Why work is missing.
    pub work_problem: Option<String>,
}

/// The status of a Pool object.
#[derive(Clone, Debug, Default)]
pub struct Pool {
    pub id: String,
    /// Its name on its node.
    pub name: String,
    pub node: String,
    /// The value of the API.
    pub health: &'static str,
    /// Whether it is as it should be.
    pub is_well: bool,
    /// It is gone for good: lost or forgotten.
    pub is_gone: bool,
    pub message: String,
    /// Since when it has this health.
    pub since: Option<Timestamp>,
    /// When its agent answered last.
    pub seen: Option<Timestamp>,
    pub total_bytes: u64,
    pub available_bytes: u64,
    /// Bytes that its volumes may grow to.
    pub promised_bytes: u64,
    /// What was frozen for longer than a cut takes when its agent answered last.
    pub frozen: Vec<Frozen>,
    pub volumes: u64,
    pub snapshots: u64,
    /// When it is full, if it fills as it did in the last day.
    pub full_at: Option<Timestamp>,
    /// Volumes and snapshots that no object names.
    pub orphans: u64,
    /// What its images occupy; `None` if that was never reported.
    pub images: Option<Images>,
    /// The volumes that grew most; `None` if that was never reported.
    pub growth: Option<Growth>,
}

/// The blocks of all images of a pool, each counted once, in bytes.
#[derive(Clone, Debug, Default)]
pub struct Images {
    /// Those that one volume has, and no other image.
    pub own: u64,
    /// Those that a volume has, and another image, too.
    pub shared: u64,
    /// Those that only snapshots and hidden bases have.
    pub snapshots: u64,
    /// An upper bound of those of images that may share some and were not compared.
    pub undivided: u64,
    /// The number of volumes that were not measured yet.
    pub unmeasured: u64,
    /// When the oldest of these numbers was measured, by the clock of the node.
    pub measured: Timestamp,
}

/// The volumes of a pool to which most bytes were added in the last day.
#[derive(Clone, Debug, Default)]
pub struct Growth {
    /// When this was measured, by the clock of the node.
    pub measured: Timestamp,
    pub volumes: Vec<Grown>,
}

/// A volume to which bytes were added, with its snapshots.
#[derive(Clone, Debug, Default)]
pub struct Grown {
    /// The ID of the volume.
    pub volume: String,
    /// "namespace/name" of its claim, if that is known.
    pub claim: Option<String>,
    pub bytes: u64,
    pub since: Timestamp,
}

/// What an agent has answered last.
#[derive(Clone, Debug, Default)]
pub struct Agent {
    pub node: String,
    pub version: String,
    /// When that was.
    pub seen: Option<Timestamp>,
    /// Why it cannot be reached now.
    pub problem: Option<String>,
    /// Whether its freeze guard responds.
    pub has_guard: bool,
    /// What its host lacks.
    pub missing: Vec<String>,
}

/// A volume whose file system is frozen for longer than a cut takes, by the clock of its node.
#[derive(Clone, Debug, Default)]
pub struct Frozen {
    /// The ID of the volume.
    pub volume: String,
    /// "namespace/name" of its claim, if that is known.
    pub claim: Option<String>,
    pub since: Timestamp,
    /// When the freeze guard thaws it at the latest.
    pub until: Timestamp,
    /// A driver or a freeze guard holds it. Otherwise the next sweep thaws it.
    pub is_held: bool,
}

/// A PersistentVolume that is bound to a claim.
#[derive(Clone, Debug, Default)]
pub struct Claim {
    /// "namespace/name".
    pub name: String,
    /// The UUID of its pool.
    pub pool: String,
}

/// A SnapshotSchedule.
#[derive(Clone, Debug, Default)]
pub struct Schedule {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    /// Its snapshots are group snapshots.
    pub is_group: bool,
    /// Its interval or cron expression.
    pub timetable: String,
    pub is_suspended: bool,
    /// The slot of the newest good set.
    pub last_cut: Option<Timestamp>,
    /// The level of that set.
    pub level: Option<String>,
    pub next_slot: Option<String>,
    /// The first slot after it whose time has come and that has no good set.
    pub overdue: Option<Timestamp>,
    /// The number of slots that were skipped.
    pub missed: u64,
    /// The newest slots that are known to have been skipped.
    pub skipped: Vec<Timestamp>,
    /// Conditions that report a problem: since when, and what.
    pub failing: Vec<(Timestamp, String)>,
}

/// Group snapshots of this driver, and snapshots of single claims that schedules have made.
#[derive(Clone, Debug, Default)]
pub struct Cuts {
    pub all: Vec<Cut>,
    /// Why they could not be read.
    pub problem: Option<String>,
    /// There are more than were read.
    pub is_cut_off: bool,
}

/// A snapshot.
#[derive(Clone, Debug, Default)]
pub struct Cut {
    pub namespace: String,
    pub name: String,
    /// The UID of its schedule.
    pub schedule: Option<String>,
    /// The claim of which it is; `None` for a group snapshot.
    pub claim: Option<String>,
    /// When it was cut, or created if that is not known.
    pub at: Timestamp,
    /// The level that was reached; `None` if that is not known.
    pub level: Option<String>,
    /// For how many milliseconds its file systems were frozen, if that is known.
    pub frozen_ms: Option<u64>,
    /// For how many milliseconds its applications were held, if that is known.
    pub held_ms: Option<u64>,
    pub state: CutState,
    /// What has failed.
    pub error: Option<String>,
}

/// The state of a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CutState {
    #[default]
    Ready,
    /// It is not ready yet.
    Unready,
    /// It is not ready, and an error is reported.
    Failed,
    /// It is being deleted.
    Leaving,
}

/// Work that has not ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// The resource of its object, such as `volumemoves`. That of an evacuation or a copy is `pools`.
    pub resource: &'static str,
    /// It is one copy.
    pub is_copy: bool,
    /// Empty for objects that have none.
    pub namespace: String,
    pub name: String,
    /// What is done.
    pub what: String,
    pub phase: String,
    /// What it waits for, or what has failed.
    pub message: String,
    /// A step has failed since this time.
    pub failing: Option<Timestamp>,
    /// When it began, if its object has that.
    pub since: Option<Timestamp>,
    /// The volumes of which it is done, of all; `None` if it is about one.
    pub volumes: Option<(u64, u64)>,
    pub done_bytes: u64,
    pub total_bytes: u64,
    /// When the bytes began to be copied.
    pub copying_since: Option<Timestamp>,
    /// How many of them had been done by then.
    pub done_before: u64,
    /// When its bytes were written last; `None` if that is not known.
    pub reported: Option<Timestamp>,
    /// The UUIDs of pools by whose agents its progress is reported.
    pub pools: Vec<String>,
    /// Work that has changed nothing by this time fails.
    pub deadline: Option<Timestamp>,
}
