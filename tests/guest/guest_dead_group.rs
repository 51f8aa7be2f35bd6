//! The disk of a volume group dies while volumes of its thin pool are in use.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and writes files"
)]

use std::fs;

use slackwater_testkit::guest::{self, in_guest};
use slackwater_testkit::{Client, Scratch, Server, binary, block, mount, run};
use tonic::Code;

use crate::guest_block_groups::file_pool;
use crate::guest_lvm::{
    Volume, check_pool, create_pool_on, end, read_at, release, runtime, until, write_at,
};

const THIN_POOL: &str = "thin=lvm:slackwater-vg/thin,init,rawBlock=unfiltered";
const NAME: &str = "pv-dies";
const DEVICE: &str = "/dev/mapper/pv-dies";
const CONFIGURATION: &str = "/etc/lvm/lvmlocal.conf";
/// The disk below has the same label.
const ONLY_MAPPED: &str =
    "devices {\n global_filter = [ \"a|^/dev/mapper/pv-dies$|\", \"r|.*|\" ]\n}\n";

/// Replaces the table of the physical volume, also while nothing that is written to it ends.
fn replace(table: &str) {
    run("dmsetup", &["load", NAME, "--table", table]);
    run("dmsetup", &["suspend", "--nolockfs", "--noflush", NAME]);
    run("dmsetup", &["resume", NAME]);
}

async fn created(scratch: &Scratch, client: &Client, name: &str, pool: &str) -> Volume {
    let how = if name == "raw" {
        block()
    } else {
        mount("ext4")
    };
    let class = [("pool", pool)];
    let id = client.create(name, 64 << 20, how.clone(), &class).await;
    let volume = Volume::of(scratch, name, id.unwrap(), how);
    volume.up(client).await;
    volume
}

/// Why the thin pool is not served; `None` if it is.
async fn refusal(client: &Client) -> Option<String> {
    let class = [("pool", "thin")];
    match client.create("probe", 1 << 20, mount("ext4"), &class).await {
        Ok(id) => {
            client.delete(&id).await.unwrap();
            None
        }
        Err(refused) => {
            let is_unserved = refused.code() == Code::Unavailable;
            is_unserved.then(|| refused.message().to_string())
        }
    }
}

/// Checks that the volumes are unpublished and unstaged as those of a dead disk, while the other pool
/// is used.
async fn end_pods(client: &Client, [files, raw, well]: [&Volume; 3]) {
    // As the kubelet ends pods. A repeat also succeeds.
    for volume in [files, raw] {
        for _ in 0..2 {
            volume.down(client).await;
        }
    }
    well.down(client).await;
    well.up(client).await;
    fs::write(well.target.join("data"), "kept").unwrap();
    well.down(client).await;
}

/// The steps of the refusal.
fn repair(advice: &str) {
    const CONFIG: &str = r#"global/thin_check_options=["-q","--clear-needs-check-flag"]"#;
    let place = "thin=lvm:slackwater-vg/thin";
    assert!(
        advice.contains(&format!("pool release {place}")),
        "{advice}"
    );
    assert!(advice.contains(&format!("--config '{CONFIG}'")), "{advice}");
    let released = run(binary(), &["pool", "release", place]);
    assert!(released.contains("is released"), "{released}");
    run("lvchange", &["--activate", "n", "slackwater-vg/thin"]);
    run("lvconvert", &["--yes", "--repair", "slackwater-vg/thin"]);
    let activate = ["--activate", "y", "--config", CONFIG, "slackwater-vg/thin"];
    run("lvchange", &activate);
}

#[test]
fn a_thin_pool_whose_disk_died_is_unserved_until_it_is_repaired() {
    let test = "guest_dead_group::a_thin_pool_whose_disk_died_is_unserved_until_it_is_repaired";
    in_guest(test, &["pool:1G", "files:2G"], || {
        let disk = guest::disk("pool");
        let sectors = run("blockdev", &["--getsz", &disk]);
        let healthy = format!("0 {} linear {disk} 0", sectors.trim());
        run("dmsetup", &["create", NAME, "--table", &healthy]);
        fs::write(CONFIGURATION, ONLY_MAPPED).unwrap();
        create_pool_on(DEVICE, "640M", "8M");
        let scratch = Scratch::new();
        let files_pool = file_pool(&scratch);
        let server = Server::start(&scratch, &[&files_pool, THIN_POOL]);
        let volumes = runtime().block_on(async {
            let client = server.client();
            let files = created(&scratch, &client, "files", "thin").await;
            let raw = created(&scratch, &client, "raw", "thin").await;
            let well = created(&scratch, &client, "well", "default").await;
            fs::write(files.target.join("data"), "kept").unwrap();
            nix::unistd::sync();
            write_at(&raw.target, 0, 1);
            replace(&format!("0 {} error", sectors.trim()));
            // This lets the kernel commit the metadata, and so the pool fails, before the driver
            // notices anything.
            run("dmsetup", &["status"]);
            end_pods(&client, [&files, &raw, &well]).await;
            until("the pool is not served", async || {
                let refused = refusal(&client).await;
                refused.is_some_and(|why| why.contains("its disk is dead"))
            })
            .await;
            run("dmsetup", &["status"]);
            [files, raw, well]
        });
        end(server);
        replace(&healthy);

        // A driver that starts now finds a pool that needs a repair.
        let server = Server::start(&scratch, &[&files_pool, THIN_POOL]);
        let advice = runtime().block_on(async { refusal(&server.client()).await.unwrap() });
        end(server);
        repair(&advice);
        let server = Server::start(&scratch, &[&files_pool, THIN_POOL]);
        runtime().block_on(async {
            let client = server.client();
            let [_, raw, _] = &volumes;
            for volume in &volumes {
                volume.up(&client).await;
                let file = volume.target.join("data");
                assert!(volume.id == raw.id || fs::read_to_string(file).unwrap() == "kept");
            }
            assert_eq!(read_at(&raw.target, 0), 1);
            for volume in &volumes {
                volume.down(&client).await;
                client.delete(&volume.id).await.unwrap();
            }
        });
        end(server);
        release();
        run("vgchange", &["--activate", "n", "slackwater-vg"]);
        run("dmsetup", &["remove", NAME]);
        fs::remove_file(CONFIGURATION).unwrap();
        run("vgchange", &["--activate", "y", "slackwater-vg"]);
        check_pool();
    });
}
