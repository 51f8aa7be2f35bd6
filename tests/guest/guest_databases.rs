//! PostgreSQL under load with its log and its data on two thin volumes, and on a thin one and one of a
//! file pool, cut as a group and started on the copies.

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::disallowed_methods,
    dead_code,
    reason = "a test panics where an expectation fails, and the other databases are not used here"
)]

#[path = "../root/databases/cluster.rs"]
mod cluster;
#[path = "../root/databases/engine.rs"]
mod engine;
#[path = "../root/databases/process.rs"]
mod process;
#[path = "../root/databases/volumes.rs"]
mod volumes;

pub use slackwater_testkit::node::*;

use slackwater_testkit::guest::{in_guest, rounds};
use slackwater_testkit::{Disk, Scratch, Server};

use crate::guest_lvm::{create_pool, end_pool, runtime};

const POOL: &str = "default=lvm:slackwater-vg/thin,init,overcommit=8";

#[test]
fn postgresql_recovers_from_every_group_cut_on_thin_volumes_and_beside_a_file_volume() {
    let test = "guest_databases::postgresql_recovers_from_every_group_cut_on_thin_volumes_and_beside_a_file_volume";
    in_guest(test, &["pool:2G"], || {
        create_pool("1500M");
        let scratch = Scratch::new();
        let disk = Disk::new(&scratch, "files", "xfs", 4 * GIB);
        let files = format!("files=file:{},init", disk.mount_point.display());
        let server = Server::start(&scratch, &[POOL, &files]);
        runtime().block_on(async {
            let node = Node::of(server, disk, scratch);
            let cuts = rounds(1, 100);
            for pools in [["default", "default"], ["default", "files"]] {
                let found = cluster::first_problem(&node, pools, cuts, false).await;
                assert_eq!(found, None, "{pools:?}\n{}", node.server.log());
            }
            drop(node.client);
            end_pool(node.server);
        });
    });
}
