//! Which attempts of a group are committed, of which some agents lie.

use uuid::Uuid;

use super::*;
use crate::router::agents::tests::agents;

/// What an agent reports of an attempt with these members, of which it has the first.
fn reported(attempt: &str, state: State, own: &str, all: &[&str]) -> GetGroupResponse {
    GetGroupResponse {
        members: vec![GroupMember {
            snapshot_id: own.into(),
            attempt: attempt.into(),
            state: state.into(),
            ..GroupMember::default()
        }],
        all_member_ids: all.iter().map(ToString::to_string).collect(),
        all_source_volume_ids: all.iter().map(|id| format!("source of {id}")).collect(),
        ..GetGroupResponse::default()
    }
}

#[tokio::test]
async fn an_invented_attempt_decides_nothing_about_another_one() {
    let agents = agents();
    let nodes = ["a", "b", "liar"];
    agents.set(nodes.map(|node| (node.to_string(), format!("{node}:1"))));
    let group = GroupId(Uuid::from_u128(1));
    let all = &["first", "second"];
    let answers = [
        ("a", reported("true", State::Ready, "first", all)),
        ("b", reported("true", State::Cut, "second", all)),
        (
            "liar",
            reported("invented", State::Ready, "third", &["third", "second"]),
        ),
    ];
    // The answers arrive in any order.
    for shift in 0..answers.len() {
        let mut answers = answers.clone();
        answers.rotate_left(shift);
        let mut state = GroupState::default();
        for (node, answer) in answers {
            state.add(group, &agents.of_node(node).unwrap(), answer);
        }
        assert!(state.is_committed_attempt("true"), "rotated by {shift}");
        let members = state.all_members();
        assert_eq!(members, ["first", "second", "third"], "all are looked up");
    }
}

#[tokio::test]
async fn an_attempt_is_not_committed_before_its_first_member() {
    let agents = agents();
    agents.set(["a", "b"].map(|node| (node.to_string(), format!("{node}:1"))));
    let group = GroupId(Uuid::from_u128(1));
    let all = &["first", "second"];
    for (lead, attempt, is_committed) in [
        (State::Cut, "one", false),
        (State::Ready, "one", true),
        // The first member is of another attempt.
        (State::Ready, "other", false),
    ] {
        let mut state = GroupState::default();
        let of_a = reported(attempt, lead, "first", all);
        state.add(group, &agents.of_node("a").unwrap(), of_a);
        let of_b = reported("one", State::Ready, "second", all);
        state.add(group, &agents.of_node("b").unwrap(), of_b);
        let found = state.is_committed_attempt("one");
        assert_eq!(found, is_committed, "{lead:?} {attempt}");
    }
}
