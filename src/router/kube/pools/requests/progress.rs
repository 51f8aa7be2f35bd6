//! What is requested of a node about a pool (`spec.adopt` and `spec.forget`), and how far that is: kept in
//! memory by the controller that sends the requests, and shown as conditions of the Pool objects.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use crate::model::PoolId;
use crate::router::kube::InCluster;
use crate::router::kube::pools::object::{Pool, PoolSpec};

/// Bytes of the message of a condition. What agents report may be longer.
const MAX_MESSAGE_BYTES: usize = 1024;

/// A request about a pool to the agent of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PoolRequest {
    /// The pool is to belong to the node, to which its disk was moved.
    Adopt,
    /// The node is to forget the pool.
    Forget,
}

impl PoolRequest {
    pub(super) const ALL: [PoolRequest; 2] = [PoolRequest::Adopt, PoolRequest::Forget];

    /// The type of its condition.
    pub(super) fn condition(self) -> &'static str {
        match self {
            PoolRequest::Adopt => "Adopted",
            PoolRequest::Forget => "Forgotten",
        }
    }

    /// The node that the spec of a pool names for it.
    pub(super) fn node(self, spec: &PoolSpec) -> Option<&str> {
        let node = match self {
            PoolRequest::Adopt => &spec.adopt,
            PoolRequest::Forget => &spec.forget,
        };
        node.as_deref().filter(|node| !node.is_empty())
    }
}

/// How far a request is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestProgress {
    /// The generation of the Pool object. What was found before it was changed proves nothing.
    pub(in crate::router::kube) generation: Option<i64>,
    /// A word for programs.
    pub(in crate::router::kube) reason: &'static str,
    /// What is awaited, or why it is refused.
    pub(in crate::router::kube) message: String,
}

/// All requests that wait for something.
pub type PoolRequests = BTreeMap<(PoolId, PoolRequest), RequestProgress>;

/// Whether this module writes a condition.
pub(in crate::router::kube) fn is_own(condition: &Condition) -> bool {
    let mut all = PoolRequest::ALL.into_iter();
    all.any(|request| condition.type_ == request.condition())
}

/// The conditions of the requests of a pool.
pub(in crate::router::kube) fn shown(
    pool: &Pool,
    requests: &PoolRequests,
    now: &Time,
) -> Vec<Condition> {
    let Some(id) = pool.id() else {
        return Vec::new();
    };
    let requested = PoolRequest::ALL.into_iter();
    let requested = requested.filter(|request| request.node(&pool.spec).is_some());
    let each = requested.map(|request| {
        let progress = requests.get(&(id, request));
        let progress = progress.filter(|it| it.generation == pool.metadata.generation);
        let (reason, message) = match progress {
            Some(progress) => (progress.reason, clipped(&progress.message)),
            None => ("Unknown", "it was not examined yet".into()),
        };
        Condition {
            last_transition_time: now.clone(),
            message,
            observed_generation: None,
            reason: reason.into(),
            status: "False".into(),
            type_: request.condition().into(),
        }
    });
    each.collect()
}

fn clipped(message: &str) -> String {
    match message.len() > MAX_MESSAGE_BYTES {
        true => format!(
            "{}…",
            &message[..message.floor_char_boundary(MAX_MESSAGE_BYTES)]
        ),
        false => message.into(),
    }
}

impl InCluster {
    /// Requests that wait for something.
    pub(in crate::router::kube) fn pool_requests(&self) -> PoolRequests {
        let all = self.requests.lock();
        all.unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_pool_requests(&self, now: PoolRequests) {
        let all = self.requests.lock();
        *all.unwrap_or_else(PoisonError::into_inner) = now;
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::jiff::Timestamp;

    use super::*;

    #[test]
    fn a_condition_is_that_of_the_present_spec_and_its_text_is_bounded() {
        let id = PoolId(uuid::Uuid::from_u128(1));
        let mut pool = Pool::new(id, "csi.example");
        pool.metadata.generation = Some(2);
        let now = Time(Timestamp::UNIX_EPOCH);
        let progress = |generation| RequestProgress {
            generation: Some(generation),
            reason: "Refused",
            message: "ä".repeat(5000),
        };
        let mut requests = PoolRequests::new();
        requests.insert((id, PoolRequest::Adopt), progress(2));
        requests.insert((id, PoolRequest::Forget), progress(1));
        assert_eq!(shown(&pool, &requests, &now), []);
        pool.spec.adopt = Some("node-1".into());
        pool.spec.forget = Some("node-2".into());
        let found = shown(&pool, &requests, &now);
        assert!(found.iter().all(is_own));
        let found = found.iter().map(|one| {
            let length = one.message.len();
            (&*one.type_, &*one.status, &*one.reason, length < 1100)
        });
        let expected = [
            ("Adopted", "False", "Refused", true),
            // What was found out about the spec before this one.
            ("Forgotten", "False", "Unknown", true),
        ];
        assert_eq!(found.collect::<Vec<_>>(), expected);
    }
}
