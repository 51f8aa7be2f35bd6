//! Objects that name an orphan, or are about to, and those that do not.

use std::sync::Arc;

use ::kube::client::Body;
use serde_json::{Value, json};

use super::*;

const VOLUME: &str = "11111111-2222-4333-8444-000000000001.aaaa";

/// An API server with one object, at this path. PersistentVolumes and Pools can be listed; other lists have
/// the status `others`.
fn server(path: &str, object: Value, others: u16) -> Client {
    let path: Arc<str> = path.into();
    let answer = move |request: http::Request<Body>| {
        let asked = request.uri().path();
        let (status, body) = match asked {
            _ if asked == &*path => (200, list(json!([object]))),
            VOLUMES | POOLS if others == 404 => (200, list(json!([]))),
            _ => (
                others,
                json!({"kind": "Status", "apiVersion": "v1", "code": others}),
            ),
        };
        let answer = http::Response::builder().status(status);
        let answer = answer.body(Body::from(body.to_string().into_bytes()));
        std::future::ready(answer.map_err(std::io::Error::other))
    };
    Client::new(tower::service_fn(answer), "default")
}

fn list(items: Value) -> Value {
    json!({"kind": "List", "apiVersion": "v1", "metadata": {}, "items": items})
}

fn orphan(what: OrphanKind) -> Orphan {
    Orphan {
        what,
        id: VOLUME.into(),
        pool: "11111111-2222-4333-8444-000000000001".parse().unwrap(),
        node: "node-1".into(),
        source: "source".into(),
        group: None,
    }
}

const VOLUMES: &str = "/api/v1/persistentvolumes";
const POOLS: &str = "/apis/slackwater.dev/v1alpha1/pools";
const CONTENTS: &str = "/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents";

/// Objects, and whether they keep an orphan of a kind.
fn objects() -> Vec<(&'static str, Value, OrphanKind, bool)> {
    let stored = json!({"spec": {"csi": {"volumeHandle": VOLUME}}}).to_string();
    vec![
        (
            VOLUMES,
            json!({"spec": {"csi": {"volumeHandle": VOLUME}}}),
            OrphanKind::Volume,
            true,
        ),
        (
            VOLUMES,
            json!({"spec": {"csi": {"volumeHandle": "other"}}}),
            OrphanKind::Volume,
            false,
        ),
        (
            POOLS,
            json!({"metadata": {"annotations": {"slackwater.dev/x": stored}}}),
            OrphanKind::Volume,
            true,
        ),
        (
            POOLS,
            json!({"spec": {"deleteOrphans": [VOLUME]}, "status": {"orphans": {"listed": [{"id": VOLUME}]}}}),
            OrphanKind::Volume,
            false,
        ),
        (
            "/apis/slackwater.dev/v1alpha1/volumemoves",
            json!({"status": {"to": {"handle": VOLUME}}}),
            OrphanKind::Volume,
            true,
        ),
    ]
}

/// The same for contents of snapshots.
fn contents() -> Vec<(&'static str, Value, OrphanKind, bool)> {
    vec![
        (
            CONTENTS,
            json!({"status": {"snapshotHandle": VOLUME}}),
            OrphanKind::Snapshot,
            true,
        ),
        (
            CONTENTS,
            json!({"spec": {"source": {"snapshotHandle": VOLUME}}}),
            OrphanKind::Snapshot,
            true,
        ),
        (
            CONTENTS,
            json!({"spec": {"source": {"volumeHandle": VOLUME}}}),
            OrphanKind::Volume,
            true,
        ),
        (
            CONTENTS,
            json!({"spec": {"source": {"volumeHandle": VOLUME}}, "status": {"snapshotHandle": "s"}}),
            OrphanKind::Volume,
            false,
        ),
        (
            CONTENTS,
            json!({"spec": {"source": {"volumeHandle": "source"}}}),
            OrphanKind::Snapshot,
            true,
        ),
        (
            CONTENTS,
            json!({"spec": {"source": {"volumeHandle": "source"}}, "status": {"snapshotHandle": "s"}}),
            OrphanKind::Snapshot,
            false,
        ),
        (
            "/apis/groupsnapshot.storage.k8s.io/v1/volumegroupsnapshotcontents",
            json!({"spec": {"source": {"volumeHandles": ["a", VOLUME]}}}),
            OrphanKind::Volume,
            true,
        ),
    ]
}

#[tokio::test]
async fn what_names_an_orphan_or_is_about_to_keeps_it() {
    for (path, mut object, what, is_named) in objects().into_iter().chain(contents()) {
        object["metadata"]["name"] = json!("it");
        let client = server(path, object.clone(), 404);
        let found = named(&client, &orphan(what)).await.unwrap();
        assert_eq!(found.is_some(), is_named, "{object}: {found:?}");
    }
}

#[tokio::test]
async fn what_cannot_be_listed_keeps_it() {
    for status in [403, 500] {
        let client = server(VOLUMES, json!({"metadata": {"name": "it"}}), status);
        named(&client, &orphan(OrphanKind::Volume))
            .await
            .unwrap_err();
    }
}
