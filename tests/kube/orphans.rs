//! `volumes --orphans`, `snapshots delete` and `pool adopt --cluster` with a driver of another name: the real program
//! and the real driver, against an API server that has the driver's objects.

use std::process::Command;

use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use crate::kubelet::ApiServer;
use crate::support::node::GIB;
use crate::support::{Scratch, Server, binary, mount};

const OTHER: &str = "nvme.example.com";
const USUAL: &str = "csi.slackwater.dev";
const HOME: &str = "99999999-2222-4333-8444-555555555555";

/// A driver of another name than the usual one, and the cluster that it is in.
struct Ground {
    api: ApiServer,
    server: Server,
    endpoint: String,
    scratch: Scratch,
}

impl Ground {
    fn new() -> Ground {
        let scratch = Scratch::new();
        let more = ["--driver-name", OTHER];
        let server = Server::spawn(&scratch, &["default=memory:"], &more, &[]);
        server.wait_ready();
        let endpoint = format!("unix://{}", server.socket().display());
        let api = ApiServer::new();
        let config = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: x\n\
             clusters: [{{name: x, cluster: {{server: 'http://{}'}}}}]\n\
             users: [{{name: x, user: {{}}}}]\n\
             contexts: [{{name: x, context: {{cluster: x, user: x}}}}]\n",
            api.address
        );
        std::fs::write(scratch.join("kubeconfig"), config).unwrap();
        let ground = Ground {
            api,
            server,
            endpoint,
            scratch,
        };
        for (path, kind) in [
            (
                "/apis/storage.k8s.io/v1/volumeattachments",
                "VolumeAttachment",
            ),
            ("/api/v1/pods", "Pod"),
        ] {
            ground.has(path, kind, json!([]));
        }
        ground
    }

    fn has(&self, path: &str, kind: &str, items: Value) {
        let list = json!({"kind": format!("{kind}List"), "apiVersion": "v1",
            "metadata": {"resourceVersion": "1"}, "items": items});
        self.api.put(path, list);
    }

    fn has_volume(&self, handle: &str) {
        let volume = json!({
            "metadata": {"name": "pv-1", "uid": "1", "resourceVersion": "1"},
            "spec": {
                "csi": {"driver": OTHER, "volumeHandle": handle},
                "claimRef": {"namespace": "shop", "name": "data", "uid": "2"},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [{
                    "key": format!("topology.{OTHER}/home"), "operator": "In", "values": ["before"],
                }]}]}},
            },
            "status": {"phase": "Bound"},
        });
        self.has(
            "/api/v1/persistentvolumes",
            "PersistentVolume",
            json!([volume]),
        );
    }

    fn has_snapshot(&self, handle: &str) {
        let content = json!({
            "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent",
            "metadata": {"name": "content-1"},
            "spec": {"driver": OTHER}, "status": {"snapshotHandle": handle},
        });
        let path = "/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents";
        self.has(path, "VolumeSnapshotContent", json!([content]));
    }

    /// The object of a group, of one version of the API.
    fn has_group(&self, version: &str, source: Value, status: Value) {
        let content = json!({
            "apiVersion": format!("groupsnapshot.storage.k8s.io/{version}"),
            "kind": "VolumeGroupSnapshotContent", "metadata": {"name": "content-of-group"},
            "spec": {"driver": OTHER, "source": source}, "status": status,
        });
        let path =
            format!("/apis/groupsnapshot.storage.k8s.io/{version}/volumegroupsnapshotcontents");
        self.has(&path, "VolumeGroupSnapshotContent", json!([content]));
    }

    fn has_pool(&self, id: &str) {
        let pool = json!({
            "metadata": {"name": id, "labels": {"slackwater.dev/driver": OTHER}},
            "status": {"node": "node-1", "home": HOME, "name": "default", "health": "Healthy",
                "lastSeen": Timestamp::now().to_string()},
        });
        self.has("/apis/slackwater.dev/v1alpha1/pools", "Pool", json!([pool]));
    }

    /// The program's exit code, and what it says.
    fn run(&self, words: &[&str]) -> (Option<i32>, String) {
        let mut command = Command::new(binary());
        command.env_remove("CSI_ENDPOINT");
        let config = self.scratch.join("kubeconfig");
        let output = command.args(words).env("KUBECONFIG", config).output();
        let output = output.unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let said = text(&output.stdout) + &text(&output.stderr);
        eprintln!("$ slackwater {}\n{said}", words.join(" "));
        (output.status.code(), said)
    }
}

#[test]
fn what_a_driver_of_another_name_has_is_no_orphan() {
    let ground = Ground::new();
    let (volume, snapshot) = ground.api.runtime.block_on(async {
        let client = ground.server.client();
        let volume = client.create("v", GIB, mount("ext4"), &[]).await.unwrap();
        let snapshot = client.snapshot("s", &volume, &[]).await.unwrap();
        (volume, snapshot.snapshot_id)
    });
    ground.has_volume(&volume);
    ground.has_snapshot(&snapshot);
    let ask = ["volumes", "--orphans", "--endpoint", &ground.endpoint];
    let (code, said) = ground.run(&ask);
    assert_eq!(code, Some(0));
    assert!(said.contains("is referenced by an object"), "{said}");
    let (code, said) = ground.run(&[&ask[..], &["--driver-name", OTHER]].concat());
    assert_eq!(code, Some(0));
    assert!(said.contains("is referenced by an object"), "{said}");
    // A wrong name is refused, and nothing is reported.
    let (code, said) = ground.run(&[&ask[..], &["--driver-name", USUAL]].concat());
    assert_eq!(code, Some(1));
    assert!(said.contains(OTHER) && said.contains(USUAL), "{said}");
    assert!(!said.contains(&snapshot), "{said}");
    // What nothing names is found as before.
    ground.has_snapshot("of-somebody-else");
    let (code, said) = ground.run(&ask);
    assert_eq!(code, Some(0));
    assert!(
        said.contains(&snapshot) && !said.contains(&volume),
        "{said}"
    );
}

#[test]
fn volumes_of_a_driver_of_another_name_follow_their_pool() {
    let ground = Ground::new();
    let volume = ground.api.runtime.block_on(async {
        let client = ground.server.client();
        client.create("v", GIB, mount("ext4"), &[]).await.unwrap()
    });
    ground.has_volume(&volume);
    let pool = volume.split('.').next().unwrap();
    ground.has_pool(pool);
    let by_pool = ["pool", "adopt", pool, "--cluster"];
    let by_driver = [&by_pool[..], &["--endpoint", &ground.endpoint]].concat();
    let by_name = [&by_pool[..], &["--driver-name", OTHER]].concat();
    for words in [&by_pool[..], &by_driver, &by_name] {
        let (code, said) = ground.run(words);
        assert_eq!(code, Some(0));
        assert!(
            said.contains("shop/data") && said.contains("before"),
            "{said}"
        );
    }
    let (code, said) = ground.run(&[&by_driver[..], &["--driver-name", USUAL]].concat());
    assert_eq!(code, Some(1));
    assert!(said.contains(OTHER) && said.contains(USUAL), "{said}");
}

/// A group whose members no object names, as a backup program leaves them; ids of the sources and
/// of the members.
async fn members(ground: &Ground) -> (String, [String; 2], [String; 2]) {
    let client = ground.server.client();
    let source = async |name: &str| client.create(name, GIB, mount("ext4"), &[]).await.unwrap();
    let sources = [source("v").await, source("w").await];
    let made = client.group("g", &sources, &[]).await.unwrap();
    let id = |n: usize| made.snapshots[n].snapshot_id.clone();
    (made.group_snapshot_id.clone(), sources, [id(0), id(1)])
}

#[test]
fn members_of_a_group_that_nothing_owns_are_listed_with_it_and_deleted_by_a_person() {
    let ground = Ground::new();
    let (group, _, [first, second]) = ground.api.runtime.block_on(members(&ground));
    ground.has_volume("of-somebody-else");
    ground.has_snapshot("of-somebody-else");
    let ask = ["volumes", "--orphans", "--endpoint", &ground.endpoint];
    let (code, said) = ground.run(&ask);
    assert_eq!(code, Some(0));
    let row = said.lines().find(|line| line.contains(&first)).unwrap();
    assert!(row.ends_with(&group), "{said}");
    let (_, said) = ground.run(&[&ask[..], &["--json"]].concat());
    let said: Value = serde_json::from_str(&said).unwrap();
    let of: Vec<_> = said["snapshots"].as_array().unwrap().iter().collect();
    assert!(
        of.len() == 2 && of.iter().all(|one| one["group_id"] == group),
        "{said}"
    );

    let delete = [
        "snapshots",
        "delete",
        &first,
        &second,
        "--endpoint",
        &ground.endpoint,
    ];
    let yes = [&delete[..], &["--yes"]].concat();
    let (code, said) = ground.run(&delete);
    assert_eq!(code, Some(0));
    assert!(
        said.contains("nothing was changed") && said.contains(&group),
        "{said}"
    );
    let asked = |part: &str| ground.api.asked(part);
    let before = [
        asked("volumesnapshotcontents"),
        asked("volumegroupsnapshotcontents"),
    ];
    let (code, said) = ground.run(&[&yes[..], &["--json"]].concat());
    assert_eq!(code, Some(0));
    let said: Value = serde_json::from_str(&said).unwrap();
    let fates: Vec<_> = said["snapshots"].as_array().unwrap().iter().collect();
    assert!(fates.iter().all(|one| one["what"] == "deleted"), "{said}");
    // Each was asked for by itself: of groups, in all three versions of their API.
    let asked = [
        asked("volumesnapshotcontents"),
        asked("volumegroupsnapshotcontents"),
    ];
    assert_eq!([asked[0] - before[0], asked[1] - before[1]], [2, 6]);
    let (code, said) = ground.run(&ask);
    assert_eq!(code, Some(0));
    assert!(!said.contains(&first) && !said.contains(&second), "{said}");
    let (code, said) = ground.run(&yes);
    assert_eq!(code, Some(0));
    assert_eq!(said.matches("does not exist").count(), 2, "{said}");
}

#[test]
fn a_snapshot_that_an_object_owns_or_may_own_is_not_deleted() {
    let ground = Ground::new();
    let (group, sources, [first, second]) = ground.api.runtime.block_on(members(&ground));
    ground.has_volume("of-somebody-else");
    let delete = [
        "snapshots",
        "delete",
        &first,
        "--yes",
        "--endpoint",
        &ground.endpoint,
    ];
    let is_left = |why: &str| {
        let (code, said) = ground.run(&delete);
        assert_eq!(code, Some(1));
        assert!(
            said.contains("skipped") && said.contains(why),
            "{why}: {said}"
        );
    };
    // A cluster that doesn't say who owns what.
    is_left("VolumeSnapshotContents");
    ground.has_snapshot(&first);
    is_left("VolumeSnapshotContent content-1 references");
    ground.has_snapshot("of-somebody-else");
    let pairs = json!([{"volumeHandle": sources[0], "snapshotHandle": first}]);
    let list = json!([{"volumeHandle": sources[0], "snapshotHandle": first}]);
    for (version, source, status) in [
        (
            "v1beta1",
            json!({}),
            json!({"volumeGroupSnapshotHandle": group}),
        ),
        (
            "v1beta1",
            json!({}),
            json!({"volumeGroupSnapshotHandle": "x", "volumeSnapshotHandlePairList": pairs}),
        ),
        (
            "v1beta2",
            json!({}),
            json!({"volumeGroupSnapshotHandle": "x", "volumeSnapshotInfoList": list}),
        ),
        (
            "v1",
            json!({"groupSnapshotHandles": {"volumeGroupSnapshotHandle": group,
            "volumeSnapshotHandles": [second]}}),
            json!({}),
        ),
        // Its call may have made this group, and not have been answered.
        ("v1", json!({"volumeHandles": sources}), json!({})),
    ] {
        ground.has_group(version, source, status);
        is_left("VolumeGroupSnapshotContent content-of-group");
    }
    ground.has_group("v1", json!({}), json!({"volumeGroupSnapshotHandle": "x"}));
    let path = "/apis/groupsnapshot.storage.k8s.io/v1/volumegroupsnapshotcontents";
    ground.api.forbid(path);
    is_left("VolumeGroupSnapshotContents");
    ground.api.objects.lock().unwrap().forbidden.clear();
    // A wrong name, an id that is none, and no word of yes.
    let (code, said) = ground.run(&[&delete[..], &["--driver-name", USUAL]].concat());
    assert_eq!(code, Some(1));
    assert!(said.contains(OTHER) && said.contains(USUAL), "{said}");
    let (code, said) = ground.run(&[
        "snapshots",
        "delete",
        "../x",
        "--endpoint",
        &ground.endpoint,
    ]);
    assert_eq!(code, Some(64));
    assert!(said.contains(r#"ID "../x": not an id"#), "{said}");
    let (code, said) = ground.run(&delete);
    assert_eq!(code, Some(0));
    assert!(said.contains("deleted"), "{said}");
    let there = ["volumes", "--orphans", "--endpoint", &ground.endpoint];
    let (_, said) = ground.run(&there);
    assert!(!said.contains(&first) && said.contains(&second), "{said}");
}
