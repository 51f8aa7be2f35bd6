//! Resolves the groups in doubt that agents report, for example after the death of a router.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::stream::{self, StreamExt};

use crate::error::{Error, chain};
use crate::model::GroupId;
use crate::operation::Key;
use crate::router::find::AT_ONCE;
use crate::router::{Router, Weak};

/// How often the router searches for members in doubt that a dead router has left.
const IN_DOUBT_POLL_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum number of groups of one agent that are resolved in one poll, because an agent may name
/// any number of them.
const MAX_RESOLVED_AT_ONCE: usize = 64;

impl Router {
    /// Resolves groups that agents have reported as unresolved.
    async fn resolve_all_reported(&self) {
        let descriptions = self.descriptions();
        let groups = descriptions.iter().flat_map(|description| {
            description
                .unsettled_groups
                .iter()
                .take(MAX_RESOLVED_AT_ONCE)
        });
        let groups: BTreeSet<GroupId> = groups.filter_map(|group| group.parse().ok()).collect();
        // A node that does not answer delays only some of them.
        let each = groups.into_iter().map(|group| self.resolve_reported(group));
        let mut each = stream::iter(each).buffer_unordered(AT_ONCE);
        while each.next().await.is_some() {}
    }

    async fn resolve_reported(&self, group: GroupId) {
        let Ok(_lock) = self.cuts.locks.acquire(Key::Group(group.0)) else {
            return;
        };
        match self.settled(group, &[]).await {
            // Another call is working on the group.
            Ok(_) | Err(Error::Pending { .. }) => {}
            Err(error) => {
                tracing::warn!(%group, error = %chain(&error), "failed to resolve a group snapshot that is in doubt");
            }
        }
    }
}

/// Resolves groups that agents report as unresolved, while this router is the leader, until all
/// clones of it are dropped.
pub(in crate::router) async fn resolve_periodically(router: Weak) {
    loop {
        tokio::time::sleep(IN_DOUBT_POLL_INTERVAL).await;
        match router.upgrade() {
            Some(router) if router.cluster.is_leader() => router.resolve_all_reported().await,
            Some(_) => {}
            None => return,
        }
    }
}
