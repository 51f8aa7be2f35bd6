//! Raw block volumes on a thin pool are refused until doctor has seen that LVM ignores them.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and writes files"
)]

use std::fs;
use std::process::Command;

use slackwater_testkit::guest::{self, in_guest};
use slackwater_testkit::{Scratch, Server, binary, block, run};
use tonic::Code;

use crate::guest_lvm::{DISKS, check_pool, create_pool, created, end_pool, runtime};
use crate::guest_pool::slackwater;

const POOL: &str = "default=lvm:slackwater-vg/thin,init,overcommit=4";
/// The guest has its own copy.
const CONFIGURATION: &str = "/etc/lvm/lvm.conf";
const FILTERED: &str = r#"devices { global_filter = [ "r|^/dev/mapper/slackwater-|" ] }"#;

fn doctor(scratch: &Scratch) -> String {
    let mut command = Command::new(binary());
    command.args(["doctor", "--pool", POOL, "--state-dir"]);
    command.arg(scratch.join("doctor-state"));
    command.arg("--node-record").arg(scratch.join("node.json"));
    let output = command.output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn raw_block_volumes_are_refused_until_lvm_ignores_them() {
    let test = "guest_filter::raw_block_volumes_are_refused_until_lvm_ignores_them";
    in_guest(test, &DISKS, || {
        create_pool("640M");
        // What distributions install consists of comments.
        fs::write(CONFIGURATION, "").unwrap();
        let scratch = Scratch::new();
        let server = Server::start(&scratch, &[POOL]);
        runtime().block_on(async {
            let client = server.client();
            let refused = async || {
                let made = client.create("raw", 64 << 20, block(), &[]).await;
                let refused = made.unwrap_err();
                assert_eq!(refused.code(), Code::FailedPrecondition);
                assert!(refused.message().contains("global_filter"), "{refused}");
            };
            refused().await;
            let found = doctor(&scratch);
            assert!(found.contains("LVM uses what tenants write"), "{found}");
            refused().await;

            fs::write(CONFIGURATION, FILTERED).unwrap();
            let found = doctor(&scratch);
            assert!(found.contains("LVM ignores raw block volumes"), "{found}");
            let raw = created(&scratch, &client, "raw", block()).await;
            raw.up(&client).await;
            raw.down(&client).await;

            // The driver does not rely on what was seen of another configuration.
            fs::write(CONFIGURATION, "").unwrap();
            doctor(&scratch);
            let staging = scratch.join("kubelet/raw.staging");
            let refused = client.stage(&raw.id, &staging, block()).await.unwrap_err();
            assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
            client.delete(&raw.id).await.unwrap();
        });
        end_pool(server);
    });
}

/// The configuration of a machine with this system ID.
fn machine(id: &str) -> String {
    format!("global {{ system_id_source = \"lvmlocal\" }}\nlocal {{ system_id = \"{id}\" }}\n")
}

#[test]
fn a_group_of_another_machine_and_one_of_two_with_a_name_are_refused() {
    let test = "guest_filter::a_group_of_another_machine_and_one_of_two_with_a_name_are_refused";
    in_guest(test, &["pool:1G", "other:64M"], || {
        fs::write(CONFIGURATION, machine("there")).unwrap();
        create_pool("640M");
        let scratch = Scratch::new();
        let place = "default=lvm:slackwater-vg/thin";
        let init = || slackwater(&["pool", "init", place], &scratch);
        let refused = |words: &str| {
            for reported in [init(), doctor(&scratch)] {
                assert!(reported.contains(words), "{words}: {reported}");
            }
        };
        fs::write(CONFIGURATION, machine("here")).unwrap();
        refused("belongs to the machine with the system ID there");
        let status = run("dmsetup", &["status", "slackwater--vg-thin"]);
        assert!(
            status.contains("thin-pool 0 "),
            "nothing was claimed: {status}"
        );
        let of_there = "local/extra_system_ids=[\"there\"]";
        let change = ["--yes", "--config", of_there, "--systemid", ""];
        run("vgchange", &[&change[..], &["slackwater-vg"]].concat());

        let disk = guest::disk("other");
        let only = format!("devices {{ filter=[\"a|{disk}|\", \"r|.*|\"] }}");
        // LVM does not see the group of the pool, and this folder would tell it of that one.
        fs::remove_dir_all("/dev/slackwater-vg").unwrap();
        run("vgcreate", &["--config", &only, "slackwater-vg", &disk]);
        refused("there are 2 volume groups with the name slackwater-vg");
        run("vgremove", &["--config", &only, "slackwater-vg"]);
        let made = init();
        assert!(!doctor(&scratch).contains("volume group:"), "{made}");
        let status = run("dmsetup", &["status", "slackwater--vg-thin"]);
        assert!(
            status.contains("thin-pool 8317129691479110770 "),
            "{status}"
        );
        check_pool();
    });
}
