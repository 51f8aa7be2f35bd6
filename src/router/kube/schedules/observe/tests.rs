//! Dates of the API server, clocks, and classes.

use serde_json::json;

use super::*;
use crate::model::Level;

#[test]
fn the_date_of_a_response_is_read() {
    let date = parse_date("Sun, 22 Nov 2026 11:05:09 GMT").unwrap();
    assert_eq!(date.to_string(), "2026-11-22T11:05:09Z");
    for wrong in [
        "",
        "2026-11-22T11:05:09Z",
        "Sun, 22 Nov 2026 11:05:09 CET",
        "Sun, 31 Nov 2026 11:05:09 GMT",
    ] {
        assert_eq!(parse_date(wrong), None, "{wrong}");
    }
}

#[test]
fn the_earlier_clock_counts() {
    let at = |second: i64| Timestamp::from_second(1_800_000_000 + second).unwrap();
    assert_eq!(clocks(at(60), at(0)), (at(0), None));
    assert_eq!(clocks(at(0), at(60)), (at(0), None));
    let (now, skew) = clocks(at(61), at(0));
    assert_eq!(now, at(0));
    assert!(skew.unwrap().contains("differ by 61 s"));
    assert!(clocks(at(0), at(100)).1.is_some());
}

#[test]
fn a_class_says_its_driver_its_policy_and_its_level() {
    let read = |driver: &str, policy: &str, parameters: Value| {
        let object = json!({"metadata": {"name": "c"}, "driver": driver, "deletionPolicy": policy,
            "parameters": parameters});
        class(
            &serde_json::from_value(object).unwrap(),
            "csi.slackwater.dev",
        )
    };
    let expected = |is_ours, deletes, level| Class {
        is_ours,
        deletes,
        level: Ok(level),
    };
    let application = json!({"consistency": "application"});
    assert_eq!(
        read("csi.slackwater.dev", "Delete", application),
        expected(true, true, Level::Application)
    );
    assert_eq!(
        read("other", "Retain", Value::Null),
        expected(false, false, Level::Filesystem)
    );
    assert!(
        read(
            "csi.slackwater.dev",
            "Delete",
            json!({"consistency": "total"})
        )
        .level
        .is_err()
    );
}

/// An API server without objects that counts its requests.
fn counted(requests: &Arc<std::sync::Mutex<Vec<String>>>, status: u16) -> Client {
    let requests = Arc::clone(requests);
    let answer = move |request: http::Request<Body>| {
        requests
            .lock()
            .unwrap()
            .push(request.uri().path().to_string());
        let list = json!({"kind": "List", "apiVersion": "v1", "metadata": {}, "items": []});
        let answer = http::Response::builder().status(status);
        let answer = answer.body(Body::from(list.to_string().into_bytes()));
        std::future::ready(answer.map_err(std::io::Error::other))
    };
    Client::new(tower::service_fn(answer), "default")
}

fn empty_pass() -> Pass {
    Pass {
        now: Timestamp::from_second(1_800_000_000).unwrap(),
        skew: None,
        groups_api: None,
        classes: BTreeMap::new(),
        snapshots: Vec::new(),
        groups: Vec::new(),
        shared: Mutex::default(),
        namespaces: Mutex::default(),
        checks: Arc::default(),
    }
}

/// Without this, each of many schedules reads all claims and contents of the cluster.
#[tokio::test]
async fn schedules_of_one_pass_share_the_lists_of_the_cluster() {
    let (requests, pass) = (Arc::default(), empty_pass());
    let client = counted(&requests, 200);
    let reads = (0..500).map(|_| pass.shared(&client));
    let reads = futures_util::future::join_all(reads).await;
    assert!(reads.iter().all(Result::is_ok));
    let contents = "/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents";
    assert_eq!(
        *requests.lock().unwrap(),
        ["/api/v1/persistentvolumeclaims", contents]
    );
    // Lists that are not new any more are read again.
    let old = Instant::now().checked_sub(MAX_AGE).unwrap();
    pass.shared.lock().await.as_mut().unwrap().0 = old;
    pass.shared(&client).await.unwrap();
    assert_eq!(requests.lock().unwrap().len(), 4);
}

#[tokio::test]
async fn schedules_of_one_namespace_share_its_lists() {
    let (requests, mut pass) = (Arc::default(), empty_pass());
    let groups = GroupVersionKind::gvk("groupsnapshot.storage.k8s.io", "v1", "VolumeGroupSnapshot");
    pass.groups_api = Some(ApiResource::from_gvk(&groups));
    let client = counted(&requests, 200);
    for namespace in ["shop", "shop", "bank", "shop"] {
        pass.of_namespace(&client, namespace).await.unwrap();
    }
    let of = |namespace: &str| {
        let of = |group: &str, kind: &str| {
            format!("/apis/{group}.storage.k8s.io/v1/namespaces/{namespace}/{kind}")
        };
        [
            of("snapshot", "volumesnapshots"),
            of("groupsnapshot", "volumegroupsnapshots"),
        ]
    };
    let expected = [of("shop"), of("bank")].concat();
    assert_eq!(*requests.lock().unwrap(), expected);
    let old = Instant::now().checked_sub(MAX_AGE).unwrap();
    let shop = Arc::clone(&pass.namespaces.lock().await["shop"]);
    shop.lock().await.as_mut().unwrap().0 = old;
    pass.of_namespace(&client, "shop").await.unwrap();
    assert_eq!(requests.lock().unwrap().len(), 6);
}

#[tokio::test]
async fn lists_that_cannot_be_read_are_an_error_and_are_not_kept() {
    let (requests, pass) = (Arc::default(), empty_pass());
    let forbidden = counted(&requests, 403);
    assert!(pass.shared(&forbidden).await.is_err());
    assert!(pass.shared(&counted(&requests, 200)).await.is_ok());
}
