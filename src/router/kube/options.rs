//! The settings of a router for its cluster.

use std::time::Duration;

use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::orphans;
use super::pools::status::UNREACHABLE_AFTER;
use super::reconcile::lease::Pace;
use crate::hook::HookRights;

/// The settings.
#[derive(Clone, Debug)]
pub struct Options {
    /// The driver's name.
    pub driver: String,
    /// Namespace and name of the agents' headless Service; `None` if agents are given by address.
    pub agent_service: Option<(String, String)>,
    /// The namespace of the router and of its Lease.
    pub namespace: String,
    /// The name of the router's pod, which is the identity of the holder of the Lease.
    pub me: String,
    /// A pool is marked as lost after its Node object and its agent have been gone for this time;
    /// never if `None`.
    pub lost_after: Option<Duration>,
    /// The pools of an agent are unreachable after it has been silent for this time.
    pub unreachable_after: SignedDuration,
    /// What allows hooks in pods to be run.
    pub hook_rights: HookRights,
    /// Whether the claims of volumes are reported in metrics.
    pub metrics_per_volume: bool,
    /// Whether a csi-snapshotter runs next to the router.
    pub has_snapshotter: bool,
    /// Times of the Lease.
    pub pace: Pace,
    /// How often the leading router checks whether something is to be written.
    pub poll_interval: Duration,
    /// How often it looks for orphans, and after which time it reports them.
    pub orphans: orphans::Pace,
    /// The clock by which slots of schedules are due, besides that of the API server.
    pub clock: fn() -> Timestamp,
}

impl Options {
    /// The defaults, for a driver of this name.
    pub fn new(driver: &str, namespace: &str, me: &str) -> Options {
        Options {
            driver: driver.into(),
            agent_service: None,
            namespace: namespace.into(),
            me: me.into(),
            lost_after: None,
            unreachable_after: UNREACHABLE_AFTER,
            hook_rights: HookRights::default(),
            metrics_per_volume: false,
            has_snapshotter: true,
            pace: Pace::default(),
            poll_interval: Duration::from_secs(5),
            orphans: orphans::Pace::default(),
            clock: Timestamp::now,
        }
    }
}
