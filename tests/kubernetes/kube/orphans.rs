//! `volumes --orphans`, `snapshots delete` and `pool adopt --cluster` with a driver of another
//! name: the real program and the real driver, with an API server that has the driver's objects.

use std::process::Command;

use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use crate::kube::kubelet::ApiServer;
use slackwater_testkit::node::GIB;
use slackwater_testkit::{Scratch, Server, binary, mount};

const OTHER: &str = "nvme.example.com";
const USUAL: &str = "csi.slackwater.dev";
const HOME: &str = "99999999-2222-4333-8444-555555555555";

/// A driver with another name than the default, and its cluster.
struct Fixture {
    api: ApiServer,
    server: Server,
    endpoint: String,
    scratch: Scratch,
}

impl Fixture {
    fn new() -> Fixture {
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
        let fixture = Fixture {
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
            fixture.has(path, kind, json!([]));
        }
        fixture
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

    /// Adds the object of a group, in one version of the API.
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

    /// The program's exit code and output.
    fn run(&self, words: &[&str]) -> (Option<i32>, String) {
        let mut command = Command::new(binary());
        command.env_remove("CSI_ENDPOINT");
        let config = self.scratch.join("kubeconfig");
        let output = command.args(words).env("KUBECONFIG", config).output();
        let output = output.unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let message = text(&output.stdout) + &text(&output.stderr);
        eprintln!("$ slackwater {}\n{message}", words.join(" "));
        (output.status.code(), message)
    }
}

#[test]
fn volumes_of_a_driver_with_another_name_are_not_orphans() {
    let fixture = Fixture::new();
    let (volume, snapshot) = fixture.api.runtime.block_on(async {
        let client = fixture.server.client();
        let volume = client.create("v", GIB, mount("ext4"), &[]).await.unwrap();
        let snapshot = client.snapshot("s", &volume, &[]).await.unwrap();
        (volume, snapshot.snapshot_id)
    });
    fixture.has_volume(&volume);
    fixture.has_snapshot(&snapshot);
    let ask = ["volumes", "--orphans", "--endpoint", &fixture.endpoint];
    let (code, message) = fixture.run(&ask);
    assert_eq!(code, Some(0));
    assert!(message.contains("is referenced by an object"), "{message}");
    let (code, message) = fixture.run(&[&ask[..], &["--driver-name", OTHER]].concat());
    assert_eq!(code, Some(0));
    assert!(message.contains("is referenced by an object"), "{message}");
    // A wrong name is refused, and nothing is reported.
    let (code, message) = fixture.run(&[&ask[..], &["--driver-name", USUAL]].concat());
    assert_eq!(code, Some(1));
    assert!(
        message.contains(OTHER) && message.contains(USUAL),
        "{message}"
    );
    assert!(!message.contains(&snapshot), "{message}");
    // Volumes without an object are found as before.
    fixture.has_snapshot("of-somebody-else");
    let (code, message) = fixture.run(&ask);
    assert_eq!(code, Some(0));
    assert!(
        message.contains(&snapshot) && !message.contains(&volume),
        "{message}"
    );
}

#[test]
fn volumes_of_a_driver_with_another_name_follow_their_pool() {
    let fixture = Fixture::new();
    let volume = fixture.api.runtime.block_on(async {
        let client = fixture.server.client();
        client.create("v", GIB, mount("ext4"), &[]).await.unwrap()
    });
    fixture.has_volume(&volume);
    let pool = volume.split('.').next().unwrap();
    fixture.has_pool(pool);
    let by_pool = ["pool", "adopt", pool, "--cluster"];
    let by_driver = [&by_pool[..], &["--endpoint", &fixture.endpoint]].concat();
    let by_name = [&by_pool[..], &["--driver-name", OTHER]].concat();
    for words in [&by_pool[..], &by_driver, &by_name] {
        let (code, message) = fixture.run(words);
        assert_eq!(code, Some(0));
        assert!(
            message.contains("shop/data") && message.contains("before"),
            "{message}"
        );
    }
    let (code, message) = fixture.run(&[&by_driver[..], &["--driver-name", USUAL]].concat());
    assert_eq!(code, Some(1));
    assert!(
        message.contains(OTHER) && message.contains(USUAL),
        "{message}"
    );
}

/// A group whose members no object names, as a backup program leaves them. Returns its ID, and the
/// IDs of the sources and of the members.
async fn members(fixture: &Fixture) -> (String, [String; 2], [String; 2]) {
    let client = fixture.server.client();
    let source = async |name: &str| client.create(name, GIB, mount("ext4"), &[]).await.unwrap();
    let sources = [source("v").await, source("w").await];
    let created = client.group("g", &sources, &[]).await.unwrap();
    let id = |n: usize| created.snapshots[n].snapshot_id.clone();
    (created.group_snapshot_id.clone(), sources, [id(0), id(1)])
}

#[test]
fn members_of_a_group_without_an_owner_are_listed_with_it_and_deleted_by_an_administrator() {
    let fixture = Fixture::new();
    let (group, _, [first, second]) = fixture.api.runtime.block_on(members(&fixture));
    fixture.has_volume("of-somebody-else");
    fixture.has_snapshot("of-somebody-else");
    let ask = ["volumes", "--orphans", "--endpoint", &fixture.endpoint];
    let (code, message) = fixture.run(&ask);
    assert_eq!(code, Some(0));
    let row = message.lines().find(|line| line.contains(&first)).unwrap();
    assert!(row.ends_with(&group), "{message}");
    let (_, message) = fixture.run(&[&ask[..], &["--json"]].concat());
    let message: Value = serde_json::from_str(&message).unwrap();
    let of: Vec<_> = message["snapshots"].as_array().unwrap().iter().collect();
    assert!(
        of.len() == 2 && of.iter().all(|one| one["group_id"] == group),
        "{message}"
    );

    let delete = [
        "snapshots",
        "delete",
        &first,
        &second,
        "--endpoint",
        &fixture.endpoint,
    ];
    let yes = [&delete[..], &["--yes"]].concat();
    let (code, message) = fixture.run(&delete);
    assert_eq!(code, Some(0));
    assert!(
        message.contains("nothing was changed") && message.contains(&group),
        "{message}"
    );
    let asked = |part: &str| fixture.api.asked(part);
    let before = [
        asked("volumesnapshotcontents"),
        asked("volumegroupsnapshotcontents"),
    ];
    let (code, message) = fixture.run(&[&yes[..], &["--json"]].concat());
    assert_eq!(code, Some(0));
    let message: Value = serde_json::from_str(&message).unwrap();
    let fates: Vec<_> = message["snapshots"].as_array().unwrap().iter().collect();
    assert!(
        fates.iter().all(|one| one["what"] == "deleted"),
        "{message}"
    );
    // Each one was queried individually; groups in all three versions of their API.
    let asked = [
        asked("volumesnapshotcontents"),
        asked("volumegroupsnapshotcontents"),
    ];
    assert_eq!([asked[0] - before[0], asked[1] - before[1]], [2, 6]);
    let (code, message) = fixture.run(&ask);
    assert_eq!(code, Some(0));
    assert!(
        !message.contains(&first) && !message.contains(&second),
        "{message}"
    );
    let (code, message) = fixture.run(&yes);
    assert_eq!(code, Some(0));
    assert_eq!(message.matches("does not exist").count(), 2, "{message}");
}

#[test]
fn a_snapshot_that_an_object_owns_or_may_own_is_not_deleted() {
    let fixture = Fixture::new();
    let (group, sources, [first, second]) = fixture.api.runtime.block_on(members(&fixture));
    fixture.has_volume("of-somebody-else");
    let delete = [
        "snapshots",
        "delete",
        &first,
        "--yes",
        "--endpoint",
        &fixture.endpoint,
    ];
    let is_left = |why: &str| {
        let (code, message) = fixture.run(&delete);
        assert_eq!(code, Some(1));
        assert!(
            message.contains("skipped") && message.contains(why),
            "{why}: {message}"
        );
    };
    // A cluster that does not report owners.
    is_left("VolumeSnapshotContents");
    fixture.has_snapshot(&first);
    is_left("VolumeSnapshotContent content-1 references");
    fixture.has_snapshot("of-somebody-else");
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
        // Its call may have created this group, and may not have been answered.
        ("v1", json!({"volumeHandles": sources}), json!({})),
    ] {
        fixture.has_group(version, source, status);
        is_left("VolumeGroupSnapshotContent content-of-group");
    }
    fixture.has_group("v1", json!({}), json!({"volumeGroupSnapshotHandle": "x"}));
    let path = "/apis/groupsnapshot.storage.k8s.io/v1/volumegroupsnapshotcontents";
    fixture.api.forbid(path);
    is_left("VolumeGroupSnapshotContents");
    fixture.api.objects.lock().unwrap().forbidden.clear();
    // A wrong name, an invalid ID, and a missing confirmation.
    let (code, message) = fixture.run(&[&delete[..], &["--driver-name", USUAL]].concat());
    assert_eq!(code, Some(1));
    assert!(
        message.contains(OTHER) && message.contains(USUAL),
        "{message}"
    );
    let (code, message) = fixture.run(&[
        "snapshots",
        "delete",
        "../x",
        "--endpoint",
        &fixture.endpoint,
    ]);
    assert_eq!(code, Some(64));
    assert!(message.contains(r#"ID "../x": not an id"#), "{message}");
    let (code, message) = fixture.run(&delete);
    assert_eq!(code, Some(0));
    assert!(message.contains("deleted"), "{message}");
    let there = ["volumes", "--orphans", "--endpoint", &fixture.endpoint];
    let (_, message) = fixture.run(&there);
    assert!(
        !message.contains(&first) && message.contains(&second),
        "{message}"
    );
}
