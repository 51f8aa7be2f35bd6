//! A restore of snapshots whose namespace is gone, with a real API server.

use std::process::Stdio;
use std::time::Instant;

use serde_json::json;

use crate::across::READER;
use crate::fixture::{DRIVER, LONG, World, days_ago, id, listed, said, without_waits};
use crate::restores::CLASSES;

#[test]
fn snapshots_are_restored_whose_namespace_is_gone() {
    let Some(mut world) = World::start("restores without a namespace with kubectl slackwater")
    else {
        return;
    };
    world.fill();
    world.plane.apply(CLASSES);
    world.plane.apply(READER);
    left_of_a_namespace(&world);
    let group = "volumegroupsnapshotcontent.groupsnapshot.storage.k8s.io/left";
    let one = "volumesnapshotcontent/left-0";
    let says = |words: &[&str]| world.says(&[&["restore"], words].concat());
    let mut all = vec![
        says(&[one]),
        says(&[one, "--to-namespace", "absent"]),
        says(&[
            "nightly-2",
            "-n",
            "shop",
            "--to-namespace",
            "other",
            "--claim",
            "x",
        ]),
        says(&[
            "volumesnapshotcontent/content-before-upgrade",
            "--to-namespace",
            "other",
        ]),
        says(&[group, "--to-namespace", "other"]),
        says(&[
            group,
            "--to-namespace",
            "other",
            "--claim",
            "left-1=log",
            "--storage-class",
            "slackwater",
            "--as",
            "reader",
        ]),
        says(&[
            group,
            "--to-namespace",
            "other",
            "--claim",
            "left-1=log",
            "--storage-class",
            "slackwater",
            "--verify",
            "true",
            "--verify-image",
            "x",
        ]),
        says(&[
            one,
            "--to-namespace",
            "other",
            "--suffix",
            "old",
            "--verify",
            "true",
            "--verify-image",
            "x",
        ]),
        says(&[
            group,
            "--to-namespace",
            "other",
            "--claim",
            "left-1=log",
            "--storage-class",
            "slackwater",
        ]),
        says(&[
            one,
            "--to-namespace",
            "other",
            "--suffix",
            "old",
            "--dry-run",
            "-o",
            "wide",
        ]),
    ];
    world.plane.start_controllers();
    let words = ["restore", group, "--to-namespace", "other", "--claim"];
    let words = [
        &words[..],
        &["left-1=log", "--storage-class", "slackwater", "--yes"],
    ]
    .concat();
    let mut child = world.command(&words);
    let child = child.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = child.spawn().unwrap();
    let uids: Vec<_> = (0..2).map(|n| provision(&world, n)).collect();
    all.push(said(&words, &child.wait_with_output().unwrap()));
    all.push(world.says(&words));
    let columns = "-o=custom-columns=:.metadata.name,:.status.phase,:.spec.volumeName";
    let claims = ["get", "pvc", "-n", "other", "--no-headers", columns];
    all.push(world.plane.kubectl(&claims));
    let contents = ["get", "vsc,vgsc", "-o", "name"];
    all.push(world.plane.kubectl(&contents));
    let mut text = all.join("\n");
    for (n, uid) in uids.iter().enumerate() {
        text = text.replace(uid, &format!("UID-{n}"));
    }
    insta::assert_snapshot!("restore_without_a_namespace", without_waits(&text));
}

/// A group of two members, of which the PersistentVolume of one is left.
fn left_of_a_namespace(world: &World) {
    let handles: Vec<_> = (0..2).map(|n| id(n, 200)).collect();
    let mut status = listed(&handles);
    status["readyToUse"] = json!(true);
    status["volumeGroupSnapshotHandle"] = json!("group");
    world.put(
        json!({"apiVersion": "groupsnapshot.storage.k8s.io/v1beta2", "kind": "VolumeGroupSnapshotContent",
        "metadata": {"name": "left", "annotations": {"slackwater.dev/level": "application",
            "slackwater.dev/cut-at": days_ago(2)}},
        "spec": {"deletionPolicy": "Retain", "driver": DRIVER,
            "source": {"volumeHandles": [id(0, 210), id(1, 210)]},
            "volumeGroupSnapshotRef": {"name": "today", "namespace": "bygone", "uid": "group"}},
        "status": status}),
    );
    for (n, handle) in handles.iter().enumerate() {
        let name = format!("left-{n}");
        world.put(json!({"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent",
            "metadata": {"name": name},
            "spec": {"deletionPolicy": "Retain", "driver": DRIVER, "sourceVolumeMode": "Filesystem",
                "source": {"volumeHandle": id(n, 210)},
                "volumeSnapshotRef": {"name": format!("today-{n}"), "namespace": "bygone", "uid": format!("old-{n}")}},
            "status": {"readyToUse": true, "snapshotHandle": handle, "restoreSize": 20_i64 << 30,
                "volumeGroupSnapshotHandle": "group"}}));
    }
    world.put(
        json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "left"},
        "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": "slackwater",
            "capacity": {"storage": "20Gi"}, "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": {"namespace": "bygone", "name": "data", "uid": "gone"},
            "csi": {"driver": DRIVER, "volumeHandle": id(0, 210)}}}),
    );
}

/// Does what snapshot-controller and the provisioner do for a member. Returns the UID of its content.
fn provision(world: &World, n: usize) -> String {
    let plane = &world.plane;
    let wait_for = |words: &[&str], is_there: &dyn Fn(&str) -> bool| {
        let start = Instant::now();
        while !is_there(&plane.kubectl(words)) {
            assert!(start.elapsed() < LONG, "it never exists: {words:?}");
        }
    };
    let of_content = [
        "get",
        "vsc",
        &format!("left-{n}"),
        "-o",
        "jsonpath={.metadata.uid}",
    ];
    let uid = plane.kubectl(&of_content);
    let name = format!("restore-{uid}");
    let in_other = ["-n", "other", "-o", "name"];
    wait_for(
        &[&["get", "volumesnapshot"], &in_other[..]].concat(),
        &|it| it.contains(&name),
    );
    let status = json!({"status": {"readyToUse": true, "boundVolumeSnapshotContentName": "x",
        "restoreSize": "20Gi"}});
    let status = status.to_string();
    let patch = [
        "patch",
        "volumesnapshot",
        &name,
        "-n",
        "other",
        "--type=merge",
    ];
    plane.kubectl(&[&patch[..], &["--subresource=status", "-p", &status]].concat());
    if n == 0 {
        return uid;
    }
    for (n, claim) in ["data", "log"].into_iter().enumerate() {
        wait_for(&[&["get", "pvc"], &in_other[..]].concat(), &|it| {
            it.contains(&format!("/{claim}\n"))
        });
        world.put(json!({"apiVersion": "v1", "kind": "PersistentVolume",
            "metadata": {"name": format!("pv-of-{claim}")},
            "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": "slackwater",
                "capacity": {"storage": "20Gi"}, "persistentVolumeReclaimPolicy": "Delete",
                "claimRef": {"namespace": "other", "name": claim},
                "csi": {"driver": DRIVER, "volumeHandle": id(n, 60)}}}));
    }
    uid
}
