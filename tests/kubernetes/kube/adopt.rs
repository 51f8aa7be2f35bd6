//! PersistentVolumes that follow an adopted pool, with the real API server, the real controllers of
//! volumes and claims, the real external-provisioner, and the real driver on simulated disks.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use slackwater::csi::NodeGetInfoRequest;
use slackwater::router::adopt::{self, Done, Plan, Step, VolumeAction};

use crate::kube::plane::Plane;
use slackwater_testkit::{Client, Scratch, Server, binary, eventually_within, mount};

const DRIVER: &str = "csi.slackwater.dev";
const KEY: &str = "topology.csi.slackwater.dev/home";
const NEW_HOME: &str = "99999999-2222-4333-8444-555555555555";
/// The number of claims, each with a volume.
const CLAIMS: usize = 5;
/// Nothing here takes as long, unless it hangs. The machine may be busy.
const LONG: Duration = Duration::from_secs(180);

/// A cluster with one node, whose driver has a volume for each claim.
struct Fixture {
    plane: Plane,
    server: Server,
    pool: String,
    _scratch: Scratch,
}

impl Fixture {
    fn new() -> Option<Fixture> {
        let mut plane = Plane::start("volumes that follow an adopted pool")?;
        let scratch = Scratch::new();
        let server = Server::start(&scratch, &["default=memory:"]);
        server.wait_ready();
        let client = plane.runtime.block_on(async { server.client() });
        let info = plane
            .runtime
            .block_on(client.node().node_get_info(NodeGetInfoRequest {}));
        let info = info.unwrap().into_inner();
        let home = info.accessible_topology.unwrap().segments[KEY].clone();
        let node = &info.node_id;
        plane.apply(include_str!("../../../deploy/chart/crds/pools.yaml"));
        let crd = [
            "wait",
            "--for=condition=Established",
            "crd/pools.slackwater.dev",
        ];
        plane.kubectl(&crd);
        plane.apply(&format!(
            "{{apiVersion: v1, kind: Namespace, metadata: {{name: shop}}}}\n---\n\
             {{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {{name: slackwater}}, \
             provisioner: {DRIVER}, reclaimPolicy: Delete, volumeBindingMode: Immediate}}\n---\n\
             {{apiVersion: v1, kind: Node, metadata: {{name: {node}, labels: {{{KEY}: {home}}}}}}}\n\
             ---\n\
             {{apiVersion: storage.k8s.io/v1, kind: CSINode, metadata: {{name: {node}}}, spec: \
             {{drivers: [{{name: {DRIVER}, nodeID: {node}, topologyKeys: [{KEY}]}}]}}}}\n"
        ));
        plane.start_controllers();
        plane.start_provisioner(server.socket());
        for n in 0..CLAIMS {
            plane.apply(&format!(
                "{{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {{name: data-{n}, \
                 namespace: shop}}, spec: {{storageClassName: slackwater, accessModes: \
                 [ReadWriteOnce], resources: {{requests: {{storage: 16Mi}}}}}}}}"
            ));
        }
        let mut fixture = Fixture {
            plane,
            server,
            pool: String::new(),
            _scratch: scratch,
        };
        eventually_within(LONG, "all claims are bound", || {
            fixture
                .claims()
                .iter()
                .all(|claim| claim["status"]["phase"] == "Bound")
        });
        let handle = fixture.volumes()[0]["spec"]["csi"]["volumeHandle"].clone();
        let (pool, _) = handle.as_str().unwrap().split_once('.').unwrap();
        fixture.pool = pool.into();
        fixture.plane.apply(&format!(
            "{{apiVersion: slackwater.dev/v1alpha1, kind: Pool, metadata: {{name: {pool}, \
             labels: {{slackwater.dev/driver: {DRIVER}}}}}}}"
        ));
        Some(fixture)
    }

    fn list(&self, words: &[&str]) -> Vec<Value> {
        let text = self
            .plane
            .kubectl(&[&["get", "-o", "json"], words].concat());
        let all: Value = serde_json::from_str(&text).unwrap();
        all["items"].as_array().unwrap().clone()
    }

    fn claims(&self) -> Vec<Value> {
        self.list(&["pvc", "-n", "shop"])
    }

    fn volumes(&self) -> Vec<Value> {
        self.list(&["pv"])
    }

    fn pool(&self) -> Value {
        let text = self
            .plane
            .kubectl(&["get", "pool", &self.pool, "-o", "json"]);
        serde_json::from_str(&text).unwrap()
    }

    /// As the controller writes it once a minute.
    fn seen_at(&self, home: &str) {
        let now = k8s_openapi::jiff::Timestamp::now().as_second();
        let now = k8s_openapi::jiff::Timestamp::from_second(now).unwrap();
        let status = json!({ "status": {
            "node": "node-9", "home": home, "name": "moved", "health": "Healthy", "lastSeen": now,
        }});
        let patch = status.to_string();
        let words = [
            "patch",
            "pool",
            &self.pool,
            "--subresource=status",
            "--type=merge",
            "-p",
        ];
        self.plane.kubectl(&[&words[..], &[&patch]].concat());
    }

    /// The driver's volumes.
    fn stored(&self) -> BTreeSet<String> {
        let listed = self.plane.runtime.block_on(async {
            let client: Client = self.server.client();
            client.list().await
        });
        listed.unwrap().into_iter().collect()
    }

    fn look(&self) -> Plan {
        self.seen_at(NEW_HOME);
        let client = self.plane.client();
        let plan = adopt::make_plan(&client, None, &self.pool);
        self.plane.runtime.block_on(plan).unwrap()
    }

    fn carry_out(&self, plan: &Plan, watch: impl FnMut(&str, Step) + Send) -> Done {
        let client = self.plane.client();
        let done = adopt::carry_out(&client, plan, LONG, watch);
        self.plane.runtime.block_on(done).unwrap()
    }

    /// Runs the real program. Returns its exit code and its output.
    fn run(&self, words: &[&str]) -> (Option<i32>, String) {
        let output = Command::new(binary())
            .args(words)
            .env("KUBECONFIG", self.plane.path("kubeconfig"))
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let stderr_text = String::from_utf8_lossy(&output.stderr).into_owned();
        eprintln!("$ slackwater {}\n{text}{stderr_text}", words.join(" "));
        (output.status.code(), text + &stderr_text)
    }
}

fn names(plan: &Plan) -> Vec<&str> {
    plan.lines.iter().map(|line| line.name.as_str()).collect()
}

fn notes(pool: &Value) -> usize {
    let annotations = pool["metadata"]["annotations"].as_object();
    let keys = annotations.into_iter().flat_map(|all| all.keys());
    keys.filter(|key| key.starts_with("adopt.slackwater.dev/"))
        .count()
}

#[test]
fn volumes_follow_an_adopted_pool_from_wherever_a_run_was_cut_off() {
    let Some(fixture) = Fixture::new() else {
        return;
    };
    let before = fixture.volumes();
    let stored = fixture.stored();
    assert_eq!(stored.len(), CLAIMS);
    is_only_shown_first(&fixture);
    is_left_while_a_pod_uses_it(&fixture);
    for step in [
        Step::Retain,
        Step::Note,
        Step::Delete,
        Step::Release,
        Step::Make,
        Step::Strike,
        Step::Restore,
    ] {
        is_cut_off(&fixture, step);
        assert_eq!(fixture.stored(), stored, "no data is deleted: {step:?}");
    }
    let plan = fixture.look();
    assert!(
        plan.lines
            .iter()
            .all(|line| line.action == VolumeAction::Finish),
        "{plan:?}"
    );
    let (code, message) = fixture.run(&["pool", "adopt", &fixture.pool, "--cluster", "--yes"]);
    assert_eq!(code, Some(0), "{message}");
    // As long as the controllers need for another pass over everything.
    std::thread::sleep(Duration::from_secs(20));
    assert_eq!(fixture.stored(), stored, "no data is deleted");
    is_as_before(&fixture, &before);
    two_runs_do_no_harm(&fixture, &before, &stored);
    lives_on(&fixture, stored);
    tells_orphans(&fixture);
}

fn is_only_shown_first(fixture: &Fixture) {
    let before = fixture.volumes();
    let home =
        before[0]["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"][0]["matchExpressions"]
            [0]["values"][0]
            .as_str()
            .unwrap();
    fixture.seen_at(home);
    let client = fixture.plane.client();
    let plan = fixture
        .plane
        .runtime
        .block_on(adopt::make_plan(&client, None, "moved"));
    let plan = plan.unwrap();
    assert_eq!(
        (plan.lines.len(), plan.settled),
        (0, CLAIMS),
        "they are at home"
    );
    let plan = fixture.look();
    assert_eq!(plan.lines.len(), CLAIMS);
    assert!(
        plan.lines
            .iter()
            .all(|line| line.action == VolumeAction::Move),
        "{plan:?}"
    );
    let (code, message) = fixture.run(&["pool", "adopt", "node-9/moved", "--cluster"]);
    assert_eq!(code, Some(0));
    for word in ["shop/data-0", home, NEW_HOME, "nothing was changed"] {
        assert!(message.contains(word), "{word}");
    }
    let (code, message) = fixture.run(&["pool", "adopt", "moved", "--cluster", "--json"]);
    assert_eq!(code, Some(0));
    let message: Value = serde_json::from_str(&message).unwrap();
    assert_eq!(message["changed"], false);
    assert_eq!(
        message["persistent_volumes"].as_array().unwrap().len(),
        CLAIMS
    );
    let versions = |volumes: &[Value]| -> Vec<Value> {
        let each = volumes.iter();
        each.map(|volume| volume["metadata"]["resourceVersion"].clone())
            .collect()
    };
    assert_eq!(versions(&before), versions(&fixture.volumes()));
    assert_eq!(notes(&fixture.pool()), 0);
    let (code, message) = fixture.run(&["pool", "adopt", "nobody", "--cluster"]);
    assert!(code == Some(1) && message.contains("nobody"), "{message}");
}

fn is_left_while_a_pod_uses_it(fixture: &Fixture) {
    let pod = "{apiVersion: v1, kind: Pod, metadata: {name: user, namespace: shop}, spec: \
               {nodeName: node-1, containers: [{name: x, image: x}], volumes: [{name: v, \
               persistentVolumeClaim: {claimName: data-0}}]}}";
    fixture.plane.apply(pod);
    let mut plan = fixture.look();
    plan.lines
        .retain(|line| line.claim.as_deref() == Some("shop/data-0"));
    let left = &plan.lines[0].action;
    assert!(
        matches!(left, VolumeAction::Left(why) if why.contains("pod shop/user")),
        "{left:?}"
    );
    let done = fixture.carry_out(&plan, |name, step| panic!("{name}: {step:?}"));
    assert!(done.moved.is_empty() && done.left.len() == 1, "{done:?}");
    let words = [
        "delete",
        "pod",
        "user",
        "-n",
        "shop",
        "--force",
        "--grace-period=0",
    ];
    fixture.plane.kubectl(&words);
}

/// A run that ends before its first such step, like a killed process.
fn is_cut_off(fixture: &Fixture, step: Step) {
    let plan = fixture.look();
    assert_eq!(plan.lines.len(), CLAIMS, "{step:?}: {plan:?}");
    let mut last = String::new();
    let ended = catch_unwind(AssertUnwindSafe(|| {
        fixture.carry_out(&plan, |name, at| {
            last = name.into();
            assert_ne!(at, step, "cut off");
        })
    }));
    assert!(ended.is_err(), "{step:?} comes: {ended:?}");
    let there: BTreeSet<String> = fixture
        .volumes()
        .iter()
        .map(|volume| volume["metadata"]["name"].as_str().unwrap().into())
        .collect();
    let away: Vec<&str> = names(&plan)
        .into_iter()
        .filter(|name| !there.contains(*name))
        .collect();
    let expected = usize::from(step == Step::Make);
    assert_eq!(away.len(), expected, "{step:?}");
    let noted = matches!(
        step,
        Step::Delete | Step::Release | Step::Make | Step::Strike
    );
    assert_eq!(notes(&fixture.pool()), usize::from(noted), "{step:?}");
    if expected == 1 {
        assert_eq!(away, [last.as_str()]);
        eventually_within(LONG, "its claim is called lost", || {
            let claims = fixture.claims();
            claims
                .iter()
                .any(|claim| claim["status"]["phase"] == "Lost")
        });
    }
}

fn is_as_before(fixture: &Fixture, before: &[Value]) {
    eventually_within(LONG, "the provisioner protects them again", || {
        let volumes = fixture.volumes();
        volumes.iter().all(|volume| {
            let finalizers = volume["metadata"]["finalizers"].to_string();
            finalizers.contains("external-provisioner") && finalizers.contains("pv-protection")
        })
    });
    let plain = |volume: &Value| {
        let metadata = &volume["metadata"];
        let mut spec = volume["spec"].clone();
        spec["nodeAffinity"]["required"]["nodeSelectorTerms"][0]["matchExpressions"][0]["values"] =
            Value::Null;
        json!([
            metadata["name"],
            metadata["annotations"],
            metadata["labels"],
            spec
        ])
    };
    let after = fixture.volumes();
    assert_eq!(
        before.iter().map(plain).collect::<Vec<_>>(),
        after.iter().map(plain).collect::<Vec<_>>()
    );
    for volume in &after {
        let terms = &volume["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"];
        let home = json!([{ "matchExpressions": [
            { "key": KEY, "operator": "In", "values": [NEW_HOME] },
        ]}]);
        assert_eq!(*terms, home);
        assert_eq!(volume["spec"]["persistentVolumeReclaimPolicy"], "Delete");
        assert_eq!(volume["status"]["phase"], "Bound");
    }
    for claim in fixture.claims() {
        assert_eq!(claim["status"]["phase"], "Bound");
        assert_eq!(claim["status"]["capacity"]["storage"], "16Mi");
    }
    assert_eq!(notes(&fixture.pool()), 0);
    let plan = fixture.look();
    assert_eq!((plan.lines.len(), plan.settled), (0, CLAIMS));
    let events = fixture
        .plane
        .kubectl(&["events", "-n", "shop", "--for=pvc/data-1"]);
    assert!(events.contains("VolumeAdopted"), "{events}");
}

/// Back to the original pool.
fn two_runs_do_no_harm(fixture: &Fixture, before: &[Value], stored: &BTreeSet<String>) {
    let home = |volume: &Value| volume["spec"]["nodeAffinity"].clone();
    let old = &before[0]["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"][0]["matchExpressions"]
        [0]["values"][0];
    fixture.seen_at(old.as_str().unwrap());
    std::thread::scope(|scope| {
        let words = ["pool", "adopt", &fixture.pool, "--cluster", "--yes"];
        let both = [(); 2].map(|()| scope.spawn(move || fixture.run(&words)));
        for run in both {
            let (code, message) = run.join().unwrap();
            assert_eq!(code, Some(0), "{message}");
        }
    });
    let after = fixture.volumes();
    assert_eq!(
        before.iter().map(home).collect::<Vec<_>>(),
        after.iter().map(home).collect::<Vec<_>>()
    );
    for volume in &after {
        assert_eq!(volume["spec"]["persistentVolumeReclaimPolicy"], "Delete");
        assert_eq!(volume["status"]["phase"], "Bound");
    }
    assert_eq!(notes(&fixture.pool()), 0);
    assert_eq!(fixture.stored(), *stored);
}

/// Later operations work as before: a claim that is deleted takes its data with it.
fn lives_on(fixture: &Fixture, mut stored: BTreeSet<String>) {
    let volumes = fixture.volumes();
    let mut of_claim = volumes.iter();
    let gone = of_claim.find(|volume| volume["spec"]["claimRef"]["name"] == "data-0");
    let handle = gone.unwrap()["spec"]["csi"]["volumeHandle"]
        .as_str()
        .unwrap();
    fixture
        .plane
        .kubectl(&["delete", "pvc", "data-0", "-n", "shop", "--wait=false"]);
    stored.remove(handle);
    eventually_within(LONG, "the volume of a deleted claim is deleted", || {
        fixture.stored() == stored && fixture.volumes().len() == CLAIMS - 1
    });
}

fn tells_orphans(fixture: &Fixture) {
    let socket = format!("unix://{}", fixture.server.socket().display());
    let orphans = ["volumes", "--orphans", "--endpoint", &socket];
    let (code, message) = fixture.run(&orphans);
    assert_eq!(code, Some(0));
    assert!(message.contains("is referenced by an object"), "{message}");
    let created = fixture.plane.runtime.block_on(async {
        let client = fixture.server.client();
        client
            .create("nobody's", 16 << 20, mount("ext4"), &[])
            .await
    });
    let created = created.unwrap();
    let (code, message) = fixture.run(&orphans);
    assert_eq!(code, Some(0));
    assert!(message.contains(&created), "{message}");
    let (_, message) = fixture.run(&[&orphans[..], &["--json"]].concat());
    let message: Value = serde_json::from_str(&message).unwrap();
    let expected = json!([{ "id": created, "pool_id": fixture.pool }]);
    assert_eq!(message["volumes"], expected);
}
