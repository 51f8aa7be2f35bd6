//! What the service account of the controller may create, change and delete: each field by itself.

use std::fmt::Debug;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::{Fixture, cached, token};
use crate::kube::api::{DRIVER, eventually};

/// Where a value of the object is set, and the beginning of the refusal.
type Case = (&'static str, Value, &'static str);

/// What the API server answers; nothing if it accepts.
fn refusal<T: Debug>(answer: Result<T, kube::Error>) -> String {
    match answer {
        Ok(_) => String::new(),
        Err(kube::Error::Api(status)) => status.message.clone(),
        Err(error) => panic!("{error}"),
    }
}

/// Sets a value at a JSON pointer, whose last part may be new. "-" appends to a list.
fn set(object: &mut Value, pointer: &str, value: Value) {
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    let parent = object
        .pointer_mut(parent)
        .unwrap_or_else(|| panic!("{pointer}"));
    let key = key.replace("~1", "/");
    match parent {
        Value::Array(list) if key == "-" => list.push(value),
        Value::Array(list) => list[key.parse::<usize>().unwrap()] = value,
        parent => parent[key.as_str()] = value,
    }
}

fn changed<K: DeserializeOwned>(object: &Value, pointer: &str, value: &Value) -> K {
    let mut object = object.clone();
    set(&mut object, pointer, value.clone());
    serde_json::from_value(object).unwrap_or_else(|error| panic!("{pointer}: {error}"))
}

/// The pod that the controller has created, as it was sent.
fn sent(pod: &Value) -> Value {
    let mut pod = pod.clone();
    let fields = pod.as_object_mut().unwrap();
    fields.remove("status");
    // Set by admission, from the class of the pod.
    let spec = fields["spec"].as_object_mut().unwrap();
    spec.retain(|key, _| !["priority", "preemptionPolicy"].contains(&key.as_str()));
    let metadata = fields["metadata"].as_object_mut().unwrap();
    for key in [
        "uid",
        "resourceVersion",
        "creationTimestamp",
        "managedFields",
        "generation",
    ] {
        metadata.remove(key);
    }
    pod
}

fn pod_cases() -> Vec<Case> {
    let containers = "containers: the pod has one container";
    let env = "containers.env";
    let ends = "containers: the container has no ports";
    let context = "containers.securityContext";
    let of_pod = "securityContext: the pod has its user";
    let volumes = "volumes: the pod has the prime claim";
    let node = "the pod shares nothing";
    let scheduled = "the pod is scheduled like others";
    let other = json!({"name": "x", "image": "x"});
    vec![
        (
            "/metadata/name",
            json!("prime-other"),
            "metadata: the pod is named",
        ),
        (
            "/metadata/ownerReferences",
            json!([]),
            "metadata: the pod is named",
        ),
        (
            "/metadata/labels/slackwater.dev~1populates",
            json!("x"),
            "metadata: the pod is named",
        ),
        (
            "/metadata/ownerReferences/0/kind",
            json!("Pod"),
            "metadata: the pod is named",
        ),
        (
            "/metadata/finalizers",
            json!(["a.example/b"]),
            "metadata: the pod is named",
        ),
        (
            "/metadata/annotations/container.apparmor.security.beta.kubernetes.io~1populate",
            json!("unconfined"),
            "metadata: the pod is named",
        ),
        ("/spec/containers/-", other.clone(), containers),
        ("/spec/initContainers", json!([other]), containers),
        ("/spec/containers/0/image", json!("busybox"), containers),
        (
            "/spec/containers/0/image",
            json!("slackwater-populate:latest"),
            containers,
        ),
        ("/spec/containers/0/command", json!(["/bin/sh"]), containers),
        ("/spec/containers/0/args", json!(["x"]), containers),
        (
            "/spec/containers/0/workingDir",
            json!("/target"),
            containers,
        ),
        (
            "/spec/containers/0/env/-",
            json!({"name": "LD_PRELOAD", "value": "x"}),
            env,
        ),
        ("/spec/containers/0/env/0/name", json!("OTHER"), env),
        (
            "/spec/containers/0/env/0",
            json!({"name": "SLACKWATER_POPULATE", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}),
            env,
        ),
        (
            "/spec/containers/0/envFrom",
            json!([{"secretRef": {"name": "a"}}]),
            env,
        ),
        (
            "/spec/containers/0/ports",
            json!([{"containerPort": 80, "hostPort": 80}]),
            ends,
        ),
        (
            "/spec/containers/0/lifecycle",
            json!({"postStart": {"exec": {"command": ["x"]}}}),
            ends,
        ),
        (
            "/spec/containers/0/livenessProbe",
            json!({"exec": {"command": ["x"]}}),
            ends,
        ),
        (
            "/spec/containers/0/readinessProbe",
            json!({"exec": {"command": ["x"]}}),
            ends,
        ),
        (
            "/spec/containers/0/startupProbe",
            json!({"exec": {"command": ["x"]}}),
            ends,
        ),
        ("/spec/containers/0/stdin", json!(true), ends),
        ("/spec/containers/0/tty", json!(true), ends),
        (
            "/spec/containers/0/securityContext/privileged",
            json!(true),
            "",
        ),
        (
            "/spec/containers/0/securityContext/allowPrivilegeEscalation",
            json!(true),
            context,
        ),
        (
            "/spec/containers/0/securityContext/readOnlyRootFilesystem",
            json!(false),
            context,
        ),
        (
            "/spec/containers/0/securityContext/capabilities/drop",
            json!([]),
            context,
        ),
        (
            "/spec/containers/0/securityContext/capabilities/add",
            json!(["CHOWN"]),
            context,
        ),
        (
            "/spec/containers/0/securityContext/capabilities/add",
            json!(["SYS_ADMIN"]),
            context,
        ),
        (
            "/spec/containers/0/securityContext/runAsUser",
            json!(0),
            context,
        ),
        (
            "/spec/containers/0/securityContext/runAsGroup",
            json!(0),
            context,
        ),
        (
            "/spec/containers/0/securityContext/runAsNonRoot",
            json!(false),
            context,
        ),
        (
            "/spec/containers/0/securityContext/seLinuxOptions",
            json!({"type": "spc_t"}),
            context,
        ),
        (
            "/spec/containers/0/securityContext/seccompProfile",
            json!({"type": "Unconfined"}),
            context,
        ),
        (
            "/spec/containers/0/securityContext/appArmorProfile",
            json!({"type": "Unconfined"}),
            context,
        ),
        ("/spec/securityContext/runAsNonRoot", json!(false), of_pod),
        ("/spec/securityContext/runAsUser", Value::Null, of_pod),
        ("/spec/securityContext/fsGroup", Value::Null, of_pod),
        (
            "/spec/securityContext/seccompProfile",
            json!({"type": "Unconfined"}),
            of_pod,
        ),
        (
            "/spec/securityContext/sysctls",
            json!([{"name": "kernel.shm_rmid_forced", "value": "1"}]),
            of_pod,
        ),
        (
            "/spec/securityContext/supplementalGroups",
            json!([0]),
            of_pod,
        ),
        (
            "/spec/securityContext/seLinuxOptions",
            json!({"type": "spc_t"}),
            of_pod,
        ),
        (
            "/spec/securityContext/appArmorProfile",
            json!({"type": "Unconfined"}),
            of_pod,
        ),
        (
            "/spec/volumes/-",
            json!({"name": "x", "hostPath": {"path": "/"}}),
            volumes,
        ),
        (
            "/spec/volumes/-",
            json!({"name": "x", "configMap": {"name": "y"}}),
            volumes,
        ),
        (
            "/spec/volumes/-",
            json!({"name": "x", "projected": {"sources": [{"configMap": {"name": "y"}}]}}),
            volumes,
        ),
        (
            "/spec/volumes/-",
            json!({"name": "x", "persistentVolumeClaim": {"claimName": "data"}}),
            volumes,
        ),
        (
            "/spec/volumes/0",
            json!({"name": "target", "persistentVolumeClaim": {"claimName": "data"}}),
            volumes,
        ),
        (
            "/spec/volumes/0",
            json!({"name": "target", "emptyDir": {}}),
            volumes,
        ),
        (
            "/spec/volumes/-",
            json!({"name": "x", "csi": {"driver": DRIVER}}),
            volumes,
        ),
        (
            "/spec/automountServiceAccountToken",
            json!(true),
            "the pod has no token",
        ),
        (
            "/spec/automountServiceAccountToken",
            Value::Null,
            "the pod has no token",
        ),
        (
            "/spec/serviceAccountName",
            json!("admin"),
            "the pod has no token",
        ),
        ("/spec/hostNetwork", json!(true), node),
        ("/spec/hostPID", json!(true), node),
        ("/spec/hostIPC", json!(true), node),
        ("/spec/shareProcessNamespace", json!(true), node),
        (
            "/spec/hostAliases",
            json!([{"ip": "10.0.0.1", "hostnames": ["images.example"]}]),
            node,
        ),
        (
            "/spec/dnsConfig",
            json!({"nameservers": ["10.0.0.1"]}),
            node,
        ),
        ("/spec/dnsPolicy", json!("Default"), node),
        ("/spec/nodeName", json!("node-1"), scheduled),
        ("/spec/schedulerName", json!("mine"), scheduled),
        ("/spec/restartPolicy", json!("Always"), scheduled),
        ("/spec/activeDeadlineSeconds", Value::Null, scheduled),
        ("/spec/runtimeClassName", json!("other"), ""),
        (
            "/spec/priorityClassName",
            json!("system-node-critical"),
            scheduled,
        ),
    ]
}

struct Account<'a> {
    fixture: &'a Fixture,
    pods: Api<Pod>,
    claims: Api<PersistentVolumeClaim>,
    volumes: Api<PersistentVolume>,
    client: kube::Client,
}

pub fn is_confined(fixture: &Fixture, pod: &Value) {
    let client = fixture.plane.client_of(&token(&fixture.plane));
    let account = Account {
        fixture,
        pods: Api::namespaced(client.clone(), "shop"),
        claims: Api::namespaced(client.clone(), "shop"),
        volumes: Api::all(client.clone()),
        client,
    };
    account.pods_have_one_form(&sent(pod));
    account.claims_are_prime_claims();
    account.volumes_are_bound_to_their_claims();
    account.only_its_own_is_deleted();
    account.snapshots_are_those_of_the_cache();
    account.contents_get_a_record_alone();
}

impl Account<'_> {
    fn dry_run() -> PostParams {
        PostParams {
            dry_run: true,
            ..PostParams::default()
        }
    }

    fn create_pod(&self, pods: &Api<Pod>, pod: &Pod) -> String {
        let params = Account::dry_run();
        let created = pods.create(&params, pod);
        refusal(self.fixture.plane.runtime.block_on(created))
    }

    fn pods_have_one_form(&self, pod: &Value) {
        let as_sent: Pod = serde_json::from_value(pod.clone()).unwrap();
        let refused = self.create_pod(&self.pods, &as_sent);
        assert_eq!(refused, "", "the pod of the controller itself");
        let mut wrong = Vec::new();
        for (pointer, value, expected) in pod_cases() {
            let refused = self.create_pod(&self.pods, &changed(pod, pointer, &value));
            let is_by_policy = refused.contains("slackwater-populators-pods");
            let is_expected = expected.is_empty() || is_by_policy && refused.contains(expected);
            if refused.is_empty() || !is_expected {
                wrong.push(format!("{pointer} {value}: {refused:?}"));
            }
        }
        assert!(wrong.is_empty(), "{wrong:#?}");
        // What built-in admission adds, and other allowed forms.
        let tolerations = json!([{"key": "a", "operator": "Exists", "effect": "NoExecute"}]);
        let root = json!({"runAsUser": 0, "runAsGroup": 0, "fsGroup": 0, "runAsNonRoot": false,
            "seccompProfile": {"type": "RuntimeDefault"}});
        for (pointer, value) in [
            ("/spec/tolerations", tolerations),
            ("/spec/imagePullSecrets", json!([{"name": "a"}])),
            ("/spec/nodeSelector", json!({"a": "b"})),
            ("/spec/serviceAccountName", json!("default")),
            (
                "/spec/volumes/-",
                json!({"name": "x", "secret": {"secretName": "token"}}),
            ),
            (
                "/spec/volumes/-",
                json!({"name": "x", "emptyDir": {"sizeLimit": "1Gi"}}),
            ),
            ("/spec/securityContext", root.clone()),
            ("/metadata/annotations/a.example~1b", json!("c")),
            (
                "/spec/containers/0/resources",
                json!({"limits": {"cpu": "1"}}),
            ),
        ] {
            let refused = self.create_pod(&self.pods, &changed(pod, pointer, &value));
            assert_eq!(refused, "", "{pointer} {value}");
        }
        let mut owners = pod.clone();
        set(&mut owners, "/spec/securityContext", root);
        let added = json!(["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID"]);
        let pointer = "/spec/containers/0/securityContext/capabilities/add";
        let refused = self.create_pod(&self.pods, &changed(&owners, pointer, &added));
        assert_eq!(refused, "", "preserveOwners");
        let refused = self.create_pod(&self.pods, &changed(&owners, pointer, &json!(["SETUID"])));
        assert!(refused.contains("containers.securityContext"), "{refused}");
        // A namespace whose owner has not allowed it.
        let bank = Api::namespaced(self.client.clone(), "bank");
        let refused = self.create_pod(&bank, &changed(pod, "/metadata/namespace", &json!("bank")));
        assert!(
            refused.contains("cannot create resource \"pods\""),
            "{refused}"
        );
    }

    fn uid(&self) -> String {
        self.fixture.get("pvc/data", ".metadata.uid")
    }

    fn claims_are_prime_claims(&self) {
        let uid = self.uid();
        let prime = json!({
            "metadata": {"name": format!("prime-{uid}"), "namespace": "shop",
                "labels": {"slackwater.dev/populates": uid},
                "ownerReferences": [{"apiVersion": "v1", "kind": "PersistentVolumeClaim",
                    "name": "data", "uid": uid}]},
            "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": "local",
                "resources": {"requests": {"storage": "1Gi"}}}});
        let create = |claim: &PersistentVolumeClaim| {
            let params = Account::dry_run();
            let created = self.claims.create(&params, claim);
            refusal(self.fixture.plane.runtime.block_on(created))
        };
        assert_eq!(create(&serde_json::from_value(prime.clone()).unwrap()), "");
        let source = json!({"apiGroup": "slackwater.dev", "kind": "HttpSource", "name": "base"});
        let snapshot =
            json!({"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "s"});
        for (pointer, value) in [
            ("/metadata/name", json!("mine")),
            ("/metadata/labels", json!({})),
            ("/metadata/ownerReferences", json!([])),
            ("/metadata/ownerReferences/0/uid", json!("x")),
            ("/spec/dataSourceRef", source),
            ("/spec/dataSource", snapshot),
            ("/spec/volumeName", json!("pv-of-another")),
            ("/spec/selector", json!({"matchLabels": {"a": "b"}})),
        ] {
            let refused = create(&changed(&prime, pointer, &value));
            assert!(
                refused.contains("creates only prime claims"),
                "{pointer}: {refused}"
            );
        }
        let cached = json!({"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot",
            "name": "cache-0"});
        let from = changed(&prime, "/spec/dataSource", &cached);
        assert_eq!(create(&from), "", "from a cached snapshot");
        let claim = json!({"kind": "PersistentVolumeClaim", "name": "cache-0"});
        let foreign = json!({"apiGroup": "other.example", "kind": "VolumeSnapshot",
            "name": "cache-0"});
        for (pointer, value) in [
            ("/spec/dataSource", claim),
            ("/spec/dataSourceRef", foreign),
        ] {
            let refused = create(&changed(&prime, pointer, &value));
            assert!(
                refused.contains("creates only prime claims"),
                "{value}: {refused}"
            );
        }
        let patch = |fields: Value| {
            let params = PatchParams {
                dry_run: true,
                ..PatchParams::default()
            };
            let fields = Patch::Merge(fields);
            let patched = self.claims.patch("other", &params, &fields);
            refusal(self.fixture.plane.runtime.block_on(patched))
        };
        let annotate = |key: &str, value: Value| json!({"metadata": {"annotations": {key: value}}});
        self.fixture.select_node("other", Some("node-1"));
        let node = "volume.kubernetes.io/selected-node";
        assert_eq!(patch(annotate("slackwater.dev/populate", json!("{}"))), "");
        assert_eq!(patch(annotate(node, Value::Null)), "");
        for fields in [
            annotate(node, json!("node-9")),
            annotate("slackwater.dev/on-node-lost", json!("recreate")),
            annotate("a.example/b", json!("c")),
            json!({"metadata": {"labels": {"a": "b"}}}),
            json!({"metadata": {"finalizers": ["a.example/b"]}}),
            json!({"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod",
                "name": "x", "uid": "y"}]}}),
            json!({"spec": {"volumeName": "pv-of-another"}}),
        ] {
            let refused = patch(fields.clone());
            assert!(
                refused.contains("slackwater-populators-claims"),
                "{fields}: {refused}"
            );
        }
    }

    fn volumes_are_bound_to_their_claims(&self) {
        let uid = self.uid();
        let apply = |name: &str, driver: &str| {
            self.fixture.plane.apply(
                &json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name},
                    "spec": {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"],
                        "persistentVolumeReclaimPolicy": "Retain", "storageClassName": "local",
                        "claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim",
                            "namespace": "shop", "name": format!("prime-{uid}"), "uid": "q"},
                        "csi": {"driver": driver, "volumeHandle": name}}})
                .to_string(),
            );
        };
        apply("pv-own", DRIVER);
        apply("pv-foreign", "other.example");
        let patch = |name: &str, fields: Value| {
            let params = PatchParams {
                dry_run: true,
                ..PatchParams::default()
            };
            let fields = Patch::Merge(fields);
            let patched = self.volumes.patch(name, &params, &fields);
            refusal(self.fixture.plane.runtime.block_on(patched))
        };
        let bound = |key: &str, value: Value| {
            let mut claim = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
                "namespace": "shop", "name": "data", "uid": uid, "resourceVersion": "1"});
            claim[key] = value;
            json!({"spec": {"claimRef": claim}})
        };
        let to_claim = || bound("name", json!("data"));
        assert_eq!(patch("pv-own", to_claim()), "");
        let refused = patch("pv-foreign", to_claim());
        assert!(
            refused.contains("binds only PersistentVolumes of"),
            "{refused}"
        );
        for (key, value) in [
            ("uid", json!("another")),
            ("uid", Value::Null),
            ("namespace", json!("bank")),
            ("kind", json!("Pod")),
            ("fieldPath", json!("spec")),
        ] {
            let refused = patch("pv-own", bound(key, value));
            assert!(refused.contains("only from prime-UID"), "{key}: {refused}");
        }
        let refused = patch("pv-own", json!({"spec": {"claimRef": null}}));
        assert!(refused.contains("only from prime-UID"), "{refused}");
        let mut others = Vec::new();
        for (key, value) in [
            ("accessModes", json!(["ReadOnlyMany"])),
            ("capacity", json!({"storage": "2Gi"})),
            ("mountOptions", json!(["suid"])),
            ("persistentVolumeReclaimPolicy", json!("Delete")),
            ("storageClassName", json!("other")),
            (
                "nodeAffinity",
                json!({"required": {"nodeSelectorTerms": [{"matchExpressions": [
                {"key": "a", "operator": "Exists"}]}]}}),
            ),
        ] {
            let mut fields = to_claim();
            fields["spec"][key] = value;
            others.push(fields);
        }
        for (key, value) in [
            ("labels", json!({"a": "b"})),
            ("annotations", json!({"a": "b"})),
            ("finalizers", json!(["a.example/b"])),
            (
                "ownerReferences",
                json!([{"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": "y"}]),
            ),
        ] {
            let mut fields = to_claim();
            fields["metadata"] = json!({key: value});
            others.push(fields);
        }
        for fields in others {
            let refused = patch("pv-own", fields.clone());
            assert!(
                refused.contains("nothing of a PersistentVolume but claimRef"),
                "{fields}: {refused}"
            );
        }
    }

    fn only_its_own_is_deleted(&self) {
        self.fixture.plane.apply(
            &json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "app", "namespace": "shop",
                "labels": {"slackwater.dev/populates": "x"}},
                "spec": {"containers": [{"name": "a", "image": "b"}]}})
            .to_string(),
        );
        let params = DeleteParams::default();
        let runtime = &self.fixture.plane.runtime;
        let refused = refusal(runtime.block_on(self.pods.delete("app", &params)).map(drop));
        assert!(
            refused.contains("deletes only the pods and the prime claims"),
            "{refused}"
        );
        let refused = refusal(
            runtime
                .block_on(self.claims.delete("other", &params))
                .map(drop),
        );
        assert!(
            refused.contains("deletes only the pods and the prime claims"),
            "{refused}"
        );
        let secrets =
            Api::<k8s_openapi::api::core::v1::Secret>::namespaced(self.client.clone(), "shop");
        let refused = refusal(runtime.block_on(secrets.get("token")));
        assert!(
            refused.contains("cannot get resource \"secrets\""),
            "{refused}"
        );
        eventually("the app is there", || !self.fixture.is_gone("pod/app"));
    }

    fn dynamic(&self, kind: &str, namespace: Option<&str>) -> Api<DynamicObject> {
        let kind = GroupVersionKind::gvk("snapshot.storage.k8s.io", "v1", kind);
        let kind = ApiResource::from_gvk(&kind);
        match namespace {
            Some(namespace) => Api::namespaced_with(self.client.clone(), namespace, &kind),
            None => Api::all_with(self.client.clone(), &kind),
        }
    }

    fn snapshots_are_those_of_the_cache(&self) {
        let create = |namespace: &str, snapshot: &DynamicObject| {
            let api = self.dynamic("VolumeSnapshot", Some(namespace));
            let params = Account::dry_run();
            refusal(
                self.fixture
                    .plane
                    .runtime
                    .block_on(api.create(&params, snapshot)),
            )
        };
        let own = cached::snapshot();
        let same = |object: &Value| changed(object, "/kind", &json!("VolumeSnapshot"));
        assert_eq!(create("shop", &same(&own)), "");
        for (pointer, value) in [
            ("/metadata/name", json!("mine")),
            ("/metadata/labels", json!({})),
            ("/metadata/labels/slackwater.dev~1cache", json!("x")),
            ("/metadata/ownerReferences", json!([])),
            ("/metadata/ownerReferences/0/kind", json!("Pod")),
            ("/metadata/ownerReferences/0/apiVersion", json!("v1")),
            ("/metadata/finalizers", json!(["a.example/b"])),
            ("/spec/volumeSnapshotClassName", json!("with-hooks")),
            ("/spec/source", json!({"persistentVolumeClaimName": "data"})),
            (
                "/spec/source",
                json!({"volumeSnapshotContentName": "of-another"}),
            ),
        ] {
            let refused = create("shop", &changed(&own, pointer, &value));
            assert!(
                refused.contains("creates only cached snapshots"),
                "{pointer}: {refused}"
            );
        }
        let refused = create(
            "bank",
            &changed(&own, "/metadata/namespace", &json!("bank")),
        );
        assert!(refused.contains("cannot create resource"), "{refused}");

        let mut mine = own;
        set(&mut mine, "/metadata/name", json!("mine"));
        self.fixture.plane.apply(&mine.to_string());
        let api = self.dynamic("VolumeSnapshot", Some("shop"));
        let params = DeleteParams::default();
        let deleted = api.delete("mine", &params);
        let refused = refusal(self.fixture.plane.runtime.block_on(deleted).map(drop));
        assert!(refused.contains("and cached snapshots"), "{refused}");
    }

    fn contents_get_a_record_alone(&self) {
        for (name, driver, snapshot) in [
            ("content-own", DRIVER, "cache-0"),
            ("content-foreign", "other.example", "cache-0"),
            ("content-other", DRIVER, "mine"),
        ] {
            let content = cached::content(name, driver, snapshot);
            self.fixture.plane.apply(&content.to_string());
        }
        let api = self.dynamic("VolumeSnapshotContent", None);
        let patch = |name: &str, fields: Value| {
            let params = PatchParams {
                dry_run: true,
                ..PatchParams::default()
            };
            let fields = Patch::Merge(fields);
            refusal(
                self.fixture
                    .plane
                    .runtime
                    .block_on(api.patch(name, &params, &fields)),
            )
        };
        let record = |key: &str| json!({"metadata": {"annotations": {key: "0"}}});
        assert_eq!(patch("content-own", record("slackwater.dev/cache-key")), "");
        for (name, fields) in [
            ("content-foreign", record("slackwater.dev/cache-key")),
            ("content-other", record("slackwater.dev/cache-key")),
            ("content-own", record("slackwater.dev/level")),
            ("content-own", json!({"metadata": {"labels": {"a": "b"}}})),
            (
                "content-own",
                json!({"metadata": {"finalizers": ["a.example/b"]}}),
            ),
            ("content-own", json!({"spec": {"deletionPolicy": "Delete"}})),
        ] {
            let refused = patch(name, fields.clone());
            assert!(
                refused.contains("records only whether snapshots"),
                "{name} {fields}: {refused}"
            );
        }
    }
}
