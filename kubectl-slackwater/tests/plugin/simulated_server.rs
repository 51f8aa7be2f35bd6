//! A simulated API server with claims, PersistentVolumes and pods, and the controllers of Kubernetes
//! that bind and delete them. It ends the connection at any request that a test chooses, before or after
//! the request was executed.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use http::{Method, Request, Response, StatusCode, Uri};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};

use crate::fixture::DRIVER;

/// Where the connection ends.
#[derive(Clone, Copy, Debug)]
pub enum Cut {
    /// Nowhere.
    Never,
    /// Before this request, counted from 0.
    Before(usize),
    /// After this request was executed, and before its answer.
    After(usize),
}

/// The objects, by their path.
#[derive(Clone, Debug, Default)]
pub struct Server {
    pub objects: BTreeMap<String, Value>,
    versions: u64,
    requests: usize,
    pub changes: Vec<String>,
    /// What has happened that must never happen.
    pub broken: Vec<String>,
    /// Namespaces in which nothing can be created: their paths.
    pub refusing: Vec<String>,
    /// How many requests for these paths are still answered with this code.
    pub failing: BTreeMap<String, (usize, u16)>,
    /// Called before each request is executed.
    pub before: Option<fn(&mut Server, &Method, &str)>,
}

pub type Shared = Arc<Mutex<Server>>;

const CLAIMS: &str = "/persistentvolumeclaims/";
const VOLUMES: &str = "/api/v1/persistentvolumes/";
const SNAPSHOTS: &str = "/apis/snapshot.storage.k8s.io/v1/namespaces/";
const CONTENTS: &str = "/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents/";

/// Kinds that are listed.
const LISTED: [&str; 11] = [
    "horizontalpodautoscalers",
    "persistentvolumeclaims",
    "persistentvolumes",
    "pods",
    "pools",
    "storageclasses",
    "volumegroupsnapshotcontents",
    "volumegroupsnapshots",
    "volumemoves",
    "volumesnapshotcontents",
    "volumesnapshots",
];

impl Server {
    pub fn claim_path(namespace: &str, name: &str) -> String {
        format!("/api/v1/namespaces/{namespace}{CLAIMS}{name}")
    }

    pub fn volume_path(name: &str) -> String {
        format!("{VOLUMES}{name}")
    }

    pub fn put(&mut self, path: &str, mut object: Value) {
        self.versions += 1;
        object["metadata"]["resourceVersion"] = json!(self.versions.to_string());
        if object["metadata"]["uid"].is_null() {
            object["metadata"]["uid"] = json!(format!("uid-{}", self.versions));
        }
        self.objects.insert(path.into(), object);
    }

    fn change(&mut self, path: &str, change: impl FnOnce(&mut Value)) {
        let mut object = self.objects[path].clone();
        change(&mut object);
        if object != self.objects[path] {
            self.put(path, object);
        }
    }

    /// One round of the controllers.
    pub fn tick(&mut self) {
        let leaves = |object: &Value| !object["metadata"]["deletionTimestamp"].is_null();
        for (path, object) in self.objects.iter().filter(|(_, object)| leaves(object)) {
            if path.starts_with(CONTENTS) && object["spec"]["deletionPolicy"] != "Retain" {
                self.broken
                    .push(format!("{path} is deleted with its snapshot"));
            }
        }
        self.objects.retain(|_, object| !leaves(object));
        self.bind_snapshots();
        self.provision();
        let volumes: Vec<_> = self.paths(VOLUMES);
        for path in volumes {
            let volume = self.objects[&path].clone();
            let reference = volume["spec"]["claimRef"].clone();
            let text = |key: &str| reference[key].as_str().unwrap_or_default().to_string();
            let claim_path = Server::claim_path(&text("namespace"), &text("name"));
            let claim = self.objects.get(&claim_path).cloned();
            let name = volume["metadata"]["name"].clone();
            let uid = reference["uid"].as_str().unwrap_or_default();
            match claim {
                Some(claim) if !uid.is_empty() && claim["metadata"]["uid"] == uid => {
                    self.change(&claim_path, |claim| {
                        claim["status"]["phase"] = json!("Bound");
                    });
                    self.change(&path, |volume| volume["status"]["phase"] = json!("Bound"));
                }
                Some(claim) if uid.is_empty() && claim["spec"]["volumeName"] == name => {
                    let uid = claim["metadata"]["uid"].clone();
                    self.change(&path, |volume| volume["spec"]["claimRef"]["uid"] = uid);
                    self.change(&claim_path, |claim| {
                        claim["status"]["phase"] = json!("Bound");
                    });
                }
                _ if uid.is_empty() => {
                    self.change(&path, |volume| {
                        volume["status"]["phase"] = json!("Available");
                    });
                }
                _ if volume["spec"]["persistentVolumeReclaimPolicy"] == "Delete" => {
                    self.broken.push(format!("{path} is deleted with its data"));
                    self.objects.remove(&path);
                }
                _ => self.change(&path, |volume| {
                    volume["status"]["phase"] = json!("Released");
                }),
            }
        }
    }

    /// Binds VolumeSnapshots to the contents that they name, as snapshot-controller and csi-snapshotter do.
    fn bind_snapshots(&mut self) {
        for path in self.paths(SNAPSHOTS) {
            let snapshot = self.objects[&path].clone();
            let name = &snapshot["spec"]["source"]["volumeSnapshotContentName"];
            let Some(name) = name.as_str() else { continue };
            let (own, metadata) = (format!("{CONTENTS}{name}"), &snapshot["metadata"]);
            let Some(content) = self.objects.get(&own).cloned() else {
                continue;
            };
            let reference = &content["spec"]["volumeSnapshotRef"];
            let is_same = |key: &str| reference[key] == metadata[key];
            let is_free = reference["uid"].is_null() || is_same("uid");
            if !is_same("name") || !is_same("namespace") || !is_free {
                continue;
            }
            let status = json!({"readyToUse": true, "restoreSize": 1 << 30,
                "snapshotHandle": content["spec"]["source"]["snapshotHandle"]});
            self.change(&own, |content| {
                content["spec"]["volumeSnapshotRef"]["uid"] = metadata["uid"].clone();
                content["status"] = status;
            });
            self.change(&path, |snapshot| {
                snapshot["status"] = json!({"readyToUse": true, "restoreSize": "1Gi",
                    "boundVolumeSnapshotContentName": name});
            });
        }
    }

    /// Creates volumes for claims with a snapshot and a node, with the snapshot's name in their handles.
    fn provision(&mut self) {
        for path in self.paths("/api/v1/namespaces/") {
            let claim = self.objects[&path].clone();
            let node = &claim["metadata"]["annotations"]["volume.kubernetes.io/selected-node"];
            let (spec, metadata) = (&claim["spec"], &claim["metadata"]);
            let is_wanted = path.contains(CLAIMS) && spec["volumeName"].is_null();
            if !is_wanted || spec["dataSource"].is_null() || node.is_null() {
                continue;
            }
            let namespace = metadata["namespace"].as_str().unwrap();
            let source = spec["dataSource"]["name"].as_str().unwrap();
            let snapshot = format!("{SNAPSHOTS}{namespace}/volumesnapshots/{source}");
            let is_ready = |it: &Value| it["status"]["readyToUse"] == true;
            if !self.objects.get(&snapshot).is_some_and(is_ready) {
                continue;
            }
            let name = format!("pv-{}", metadata["uid"].as_str().unwrap());
            let handle = spec["dataSource"]["name"].clone();
            self.put(
                &Server::volume_path(&name),
                json!({"metadata": {"name": name},
                    "spec": {"csi": {"driver": DRIVER, "volumeHandle": handle},
                        "persistentVolumeReclaimPolicy": "Delete",
                        "claimRef": {"namespace": metadata["namespace"], "name": metadata["name"],
                            "uid": metadata["uid"]}}}),
            );
            self.change(&path, |claim| claim["spec"]["volumeName"] = json!(name));
        }
    }

    fn paths(&self, prefix: &str) -> Vec<String> {
        let paths = self.objects.keys().filter(|path| path.starts_with(prefix));
        paths.cloned().collect()
    }

    /// A dry run has the same answer, and stores nothing.
    fn answer(&mut self, method: &Method, uri: &Uri, body: &Value) -> (StatusCode, Value) {
        let is_dry = uri.query().is_some_and(|query| query.contains("dryRun"));
        match is_dry {
            true => self.clone().execute(method, uri.path(), body),
            false => self.execute(method, uri.path(), body),
        }
    }

    fn execute(&mut self, method: &Method, path: &str, body: &Value) -> (StatusCode, Value) {
        let parent = path.split('/').take(5).collect::<Vec<_>>().join("/");
        if *method == Method::POST && self.refusing.contains(&parent) {
            return refused(StatusCode::FORBIDDEN, "exceeded quota");
        }
        if let Some((left, code)) = self.failing.get_mut(path).filter(|(left, _)| *left > 0) {
            *left -= 1;
            return refused(StatusCode::from_u16(*code).unwrap(), "the server is away");
        }
        if path.ends_with("/selfsubjectaccessreviews") {
            let mut answer = body.clone();
            answer["status"] = json!({"allowed": true});
            return (StatusCode::CREATED, answer);
        }
        if *method != Method::GET {
            self.changes.push(format!("{method} {path}"));
        }
        match *method {
            Method::GET => self.read(path),
            Method::POST => {
                let prefix = body["metadata"]["generateName"].as_str();
                let name = match body["metadata"]["name"].as_str() {
                    Some(name) => name.to_string(),
                    None => format!("{}new", prefix.unwrap()),
                };
                let own = format!("{path}/{name}");
                if self.objects.contains_key(&own) {
                    return refused(StatusCode::CONFLICT, "AlreadyExists");
                }
                let mut object = body.clone();
                object["metadata"]["name"] = json!(name);
                let mut parts = path.split('/').skip_while(|part| *part != "namespaces");
                if let Some(namespace) = parts.nth(1) {
                    object["metadata"]["namespace"] = json!(namespace);
                }
                object["status"] = json!({"phase": "Pending"});
                self.put(&own, object);
                (StatusCode::CREATED, self.objects[&own].clone())
            }
            Method::PATCH => {
                let Some(object) = self.objects.get(path) else {
                    return refused(StatusCode::NOT_FOUND, "NotFound");
                };
                let mut object = object.clone();
                if body["metadata"]["resourceVersion"] != object["metadata"]["resourceVersion"] {
                    return refused(StatusCode::CONFLICT, "Conflict");
                }
                merge(&mut object, body);
                self.put(path, object);
                (StatusCode::OK, self.objects[path].clone())
            }
            Method::DELETE => {
                let Some(object) = self.objects.get(path) else {
                    return refused(StatusCode::NOT_FOUND, "NotFound");
                };
                let wanted = &body["preconditions"];
                let is_same =
                    |key: &str| wanted[key].is_null() || wanted[key] == object["metadata"][key];
                if !is_same("uid") || !is_same("resourceVersion") {
                    return refused(StatusCode::CONFLICT, "Conflict");
                }
                let now = json!("2026-01-02T00:00:00Z");
                self.change(path, |object| object["metadata"]["deletionTimestamp"] = now);
                (StatusCode::OK, self.objects[path].clone())
            }
            _ => panic!("{method} {path}"),
        }
    }

    fn read(&self, path: &str) -> (StatusCode, Value) {
        if let Some(object) = self.objects.get(path) {
            return (StatusCode::OK, object.clone());
        }
        let plural = path.rsplit('/').next().unwrap();
        let is_list = LISTED.contains(&plural);
        if !is_list {
            return refused(StatusCode::NOT_FOUND, "NotFound");
        }
        let prefix = format!("{path}/");
        let items: Vec<_> = self
            .paths(&prefix)
            .iter()
            .map(|it| self.objects[it].clone())
            .collect();
        let list = json!({"apiVersion": "v1", "kind": "List", "metadata": {}, "items": items});
        (StatusCode::OK, list)
    }
}

fn merge(object: &mut Value, patch: &Value) {
    let Some(fields) = patch.as_object() else {
        *object = patch.clone();
        return;
    };
    if !object.is_object() {
        *object = json!({});
    }
    for (key, value) in fields {
        match value {
            Value::Null => {
                object.as_object_mut().unwrap().remove(key);
            }
            value => merge(&mut object[key], value),
        }
    }
}

fn refused(code: StatusCode, reason: &str) -> (StatusCode, Value) {
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": reason, "reason": reason, "code": code.as_u16()});
    (code, status)
}

/// A client whose connection ends at `cut`. All requests after it fail, too, as of a program that was
/// killed.
pub fn client(server: &Shared, cut: Cut) -> Client {
    let server = Arc::clone(server);
    server.lock().unwrap().requests = 0;
    let service = tower::service_fn(move |request: Request<Body>| {
        let server = Arc::clone(&server);
        async move {
            let (parts, body) = request.into_parts();
            let body = body.collect_bytes().await.unwrap();
            let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
            let mut server = server.lock().unwrap();
            let at = server.requests;
            server.requests += 1;
            assert!(at < 1000, "it asks for ever: {:?}", server.changes.last());
            let is_executed = match cut {
                Cut::Never => true,
                Cut::Before(cut) => at < cut,
                Cut::After(cut) => at <= cut,
            };
            if is_executed {
                if let Some(before) = server.before {
                    before(&mut server, &parts.method, parts.uri.path());
                }
                let (code, answer) = server.answer(&parts.method, &parts.uri, &body);
                if !matches!(cut, Cut::After(cut) if at == cut) {
                    let answer = Body::from(answer.to_string().into_bytes());
                    let response = Response::builder().status(code).body(answer);
                    return Ok::<_, Infallible>(response.unwrap());
                }
            }
            let (code, answer) = refused(StatusCode::GATEWAY_TIMEOUT, "the connection ended");
            let answer = Body::from(answer.to_string().into_bytes());
            Ok(Response::builder().status(code).body(answer).unwrap())
        }
    });
    Client::new(service, "default")
}

/// The number of requests of the last client.
pub fn requests(server: &Shared) -> usize {
    server.lock().unwrap().requests
}
