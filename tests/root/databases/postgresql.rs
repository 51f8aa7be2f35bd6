//! Cuts of a PostgreSQL cluster on two volumes of a file pool.

use super::cluster::first_problem;
use super::{Node, rounds};

const POOLS: [&str; 2] = ["default"; 2];

#[tokio::test(flavor = "multi_thread")]
async fn postgresql_recovers_from_every_group_cut_and_loses_no_acknowledged_commit() {
    let node = Node::new();
    let found = first_problem(&node, POOLS, rounds(6, 600), false).await;
    assert_eq!(found, None);
    node.assert_nothing_left();
}

/// The same in sequence, log first: a commit or a checkpoint comes between, and PostgreSQL refuses
/// the copy, or the copy lacks a commit.
#[tokio::test(flavor = "multi_thread")]
async fn cut_in_sequence_postgresql_does_not_recover_from_every_cut() {
    let node = Node::new();
    let found = first_problem(&node, POOLS, 60, true).await;
    let found = found.expect("60 cuts in sequence, and all are good");
    println!("{found}");
    node.assert_nothing_left();
}
