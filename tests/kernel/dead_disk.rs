//! Disks that die while they are served.

use super::support::{Client, Disk, Scratch, Server, mount, run, succeeds};
use super::{GIB, check_pattern, write_pattern};

/// Shuts a file system down, as a log that can't be written does.
fn kill(disk: &Disk) {
    let folder = disk.mount_point.to_str().unwrap();
    run("xfs_io", &["-x", "-c", "shutdown", folder]);
}

async fn create(client: &Client, pool: &str, name: &str) -> String {
    let parameters = [("pool", pool)];
    let made = client.create(name, GIB / 2, mount("ext4"), &parameters);
    made.await.unwrap()
}

#[tokio::test]
async fn a_dead_disk_and_the_loops_on_it_are_the_trouble_of_its_own_pool_alone() {
    for fs in ["xfs", "ext4"] {
        let scratch = Scratch::new();
        let dead = Disk::new(&scratch, "dead", fs, 2 * GIB);
        let well = Disk::new(&scratch, "well", fs, 2 * GIB);
        let definition =
            |disk: &Disk, name| format!("{name}=file:{},init", disk.mount_point.display());
        let pools = [definition(&dead, "dead"), definition(&well, "well")];
        let mut server = Server::start(&scratch, &[&pools[0], &pools[1]]);
        let client = server.client();
        let at = |name: &str| scratch.dir("kubelet").join(name);
        let lost = create(&client, "dead", "lost").await;
        let id = create(&client, "well", "id").await;
        for (id, name) in [(&lost, "dead"), (&id, "well")] {
            let (staging, target) = (at(name), at(&format!("{name}.target")));
            client.stage(id, &staging, mount("ext4")).await.unwrap();
            client
                .publish(id, &staging, &target, mount("ext4"), false)
                .await
                .unwrap();
        }
        write_pattern(&at("well.target").join("data"), 1, 1 << 20);
        // A stranger's as well, by the name that images of volumes have.
        let image = dead.mount_point.join("data.img");
        std::fs::File::create(&image)
            .unwrap()
            .set_len(1 << 20)
            .unwrap();
        assert!(succeeds("losetup", &["--find", image.to_str().unwrap()]));
        kill(&dead);

        client.unpublish(&id, &at("well.target")).await.unwrap();
        client.unstage(&id, &at("well")).await.unwrap();
        client.stage(&id, &at("well"), mount("ext4")).await.unwrap();
        check_pattern(&at("well").join("data"), 1, 1 << 20);
        let other = create(&client, "well", "other").await;
        server.restart();
        let client = server.client();
        client.delete(&other).await.unwrap();
        client.unstage(&id, &at("well")).await.unwrap();
        client.delete_unused(&id).await;
        assert_eq!(well.volumes(), Vec::<std::path::PathBuf>::new(), "{fs}");
    }
}
