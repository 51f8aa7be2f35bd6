//! Requests about pools, as the status shows them, and what agents report of pools that wait for one.

use super::*;
use crate::agent::pool::Presence;
use crate::router::kube::pools::requests::progress::{PoolRequest, RequestProgress};

fn refused(n: u128, presence: Presence) -> Shown {
    Shown {
        refusal: "for some reason".into(),
        presence: presence.into(),
        ..shown(n)
    }
}

#[test]
fn a_request_has_a_condition_while_its_field_is_set() {
    let mut sky = Sky::new();
    sky.says("a", vec![refused(1, Presence::Absent)]);
    sky.pools.insert(id(1), Pool::new(id(1), DRIVER));
    sky.write();
    assert_eq!(conditions(&sky, 1), []);
    let adopt = |sky: &mut Sky, node: Option<&str>| {
        let pool = sky.pools.get_mut(&id(1)).unwrap();
        pool.spec.adopt = node.map(str::to_string);
        let generation = pool.metadata.generation.unwrap_or(0) + 1;
        pool.metadata.generation = Some(generation);
    };
    let words_of = |sky: &Sky| {
        let all = conditions(sky, 1).into_iter();
        let words: Vec<_> = all
            .map(|(kind, status, why)| format!("{kind} {status} {why}"))
            .collect();
        words.join(", ")
    };
    adopt(&mut sky, Some("b"));
    sky.write();
    assert_eq!(words_of(&sky), "Adopted False Unknown");
    let found = RequestProgress {
        generation: Some(1),
        reason: "Unreachable",
        message: "the agent of node b cannot be reached".into(),
    };
    sky.requests.insert((id(1), PoolRequest::Adopt), found);
    // At once, and not with the next numbers of the pool.
    assert_eq!(sky.write().len(), 1);
    assert_eq!(words_of(&sky), "Adopted False Unreachable");
    let message = &sky.status(1).conditions[0].message;
    assert!(message.contains("node b"), "{message}");
    // Another node in the field: what was found about the first one is not shown.
    adopt(&mut sky, Some("c"));
    sky.write();
    assert_eq!(words_of(&sky), "Adopted False Unknown");
    adopt(&mut sky, None);
    sky.write();
    assert_eq!(words_of(&sky), "");
}

/// A node that has had the pool and misses its disk is no second node with it.
#[test]
fn a_node_that_misses_the_disk_is_not_in_conflict_with_one_that_has_it() {
    let mut sky = Sky::new();
    sky.says("a", vec![refused(1, Presence::Absent)]);
    sky.says("b", vec![refused(1, Presence::OtherHome)]);
    sky.write();
    assert_eq!(sky.status(1).node, "b");
    assert_eq!(sky.status(1).health, Health::NotServed);
    // Agents of earlier releases do not say which of them misses it.
    let mut sky = Sky::new();
    for node in ["a", "b"] {
        sky.says(node, vec![refused(1, Presence::Unknown)]);
    }
    sky.write();
    assert_eq!(sky.status(1).health, Health::Conflict);
    // None of them has it.
    let mut sky = Sky::new();
    for node in ["a", "b"] {
        sky.says(node, vec![refused(1, Presence::Absent)]);
    }
    sky.write();
    assert_eq!(sky.status(1).health, Health::Conflict);
}
