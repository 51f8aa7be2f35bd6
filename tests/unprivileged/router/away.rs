//! Agents that are killed, hang, or come back with other pools; deadlines and callers that
//! disconnect.

use std::sync::atomic::Ordering;
use std::time::Duration;

use slackwater::csi::*;
use slackwater::model::PoolId;
use tonic::{Code, Request};
use uuid::Uuid;

use crate::router::cluster::*;
use crate::router::fake::{Fake, silent};
use crate::service::harness::*;

#[tokio::test(flavor = "multi_thread")]
async fn objects_on_an_unreachable_agent_are_unavailable_and_the_error_names_it() {
    let mut a = AgentNode::start("node-a", &["default"], None);
    let b = AgentNode::start("node-b", &["default"], None);
    let routed = TestRouter::of(&[&a, &b]).await;
    let (va, vb) = (
        routed.create_on("va", &a).await,
        routed.create_on("vb", &b).await,
    );
    a.kill();
    let mut controller = routed.controller();
    // At first the call notices it, later the last poll.
    for _ in 0..3 {
        let away = &["node-a"];
        let request = DeleteVolumeRequest {
            volume_id: va.clone(),
            ..Default::default()
        };
        refused(
            controller.delete_volume(request).await,
            Code::Unavailable,
            away,
        );
        refused(
            controller.create_snapshot(snapshot("s", &va)).await,
            Code::Unavailable,
            away,
        );
        let by_source = ListSnapshotsRequest {
            source_volume_id: va.clone(),
            ..Default::default()
        };
        refused(
            controller.list_snapshots(by_source).await,
            Code::Unavailable,
            away,
        );
        let source = Some(from_volume(&va));
        let clone = CreateVolumeRequest {
            volume_content_source: Some(VolumeContentSource { r#type: source }),
            ..create("clone")
        };
        refused(routed.create(clone).await, Code::Unavailable, away);
        refused(routed.list(0).await, Code::Unavailable, away);
        refused(
            routed.create(create("anywhere")).await,
            Code::Unavailable,
            away,
        );
        routed.until("node-a", false).await;
    }
    // The other node keeps working.
    let request = ControllerExpandVolumeRequest {
        volume_id: vb,
        capacity_range: at_least(2 * GIB),
        ..Default::default()
    };
    controller.controller_expand_volume(request).await.unwrap();
    a.revive();
    routed.until("node-a", true).await;
    assert_eq!(routed.list(0).await.unwrap().len(), 2);
    let request = DeleteVolumeRequest {
        volume_id: va,
        ..Default::default()
    };
    controller.delete_volume(request).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_accepts_connections_and_never_answers_delays_no_other_node() {
    let a = AgentNode::start("node-a", &["default"], None);
    let hanging = silent();
    let routed = TestRouter::with(Default::default()).await;
    routed
        .set(&[("node-a", a.address), ("node-b", hanging.address)])
        .await;
    let id = routed.create_on("v", &a).await;
    let deleted = DeleteVolumeRequest {
        volume_id: id,
        ..Default::default()
    };
    routed.controller().delete_volume(deleted).await.unwrap();
    refused(routed.list(0).await, Code::Unavailable, &["node-b"]);
    // Its home is unknown: whatever is requested of all agents is computed without it.
    let capacity = routed
        .controller()
        .get_capacity(GetCapacityRequest::default())
        .await;
    assert!(capacity.unwrap().into_inner().available_capacity > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_comes_back_with_other_pools_is_accepted() {
    let mut a = AgentNode::start("node-a", &["one", "two"], None);
    let b = AgentNode::start("node-b", &["default"], None);
    let routed = TestRouter::of(&[&a, &b]).await;
    let mut request = at(create("v"), &[&a.home()]);
    request.parameters.insert("pool".into(), "one".into());
    let id = routed.create(request).await.unwrap().volume_id;
    a.restart(&["two"]);
    // Whether or not it was polled since: never "not found". Before, which may be a moment only, never
    // an empty list.
    for asked_since in [false, true] {
        if asked_since {
            routed
                .until_described("node-a", |description| description.pools.len() == 1)
                .await;
        }
        let mut controller = routed.controller();
        let pool = id.split('.').next().unwrap();
        // The connection that the restart broke is noticed by the first call that uses it. If that is a
        // poll, the refusal names the pool as well as the agent.
        eventually("the agent answers", async || {
            let request = DeleteVolumeRequest {
                volume_id: id.clone(),
                ..Default::default()
            };
            let deleted = controller.delete_volume(request).await;
            let refusal = deleted.unwrap_err();
            assert_eq!(refusal.code(), Code::Unavailable, "{refusal:?}");
            let is_of_connection = refusal.message().contains("the agent of node node-a");
            let is_of_pool = refusal.message().contains(pool);
            assert!(is_of_connection || is_of_pool, "{refusal:?}");
            !is_of_connection
        })
        .await;
        let listed = routed.list(0).await;
        let seen = routed.agents.of_node("node-a").unwrap().seen();
        if seen
            .description
            .is_none_or(|reported| reported.pools.len() == 2)
        {
            refused(listed, Code::Unavailable, &[]);
        }
    }
    a.restart(&["one", "two"]);
    routed
        .until_described("node-a", |description| description.pools.len() == 2)
        .await;
    assert_eq!(routed.list(0).await.unwrap(), [id]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_agent_at_an_agents_address_is_not_used() {
    let a = AgentNode::start("node-a", &["default"], None);
    let id = format!("{}.{}", a.pool_id(), Uuid::from_u128(1));
    let routed = TestRouter::with(Default::default()).await;
    routed.set(&[("node-z", a.address)]).await;
    let request = || DeleteVolumeRequest {
        volume_id: id.clone(),
        ..Default::default()
    };
    let problem = routed
        .agents
        .of_node("node-z")
        .unwrap()
        .check()
        .unwrap_err();
    assert!(
        problem
            .to_string()
            .contains("it reports to be node \"node-a\""),
        "{problem}"
    );
    refused(
        routed.controller().delete_volume(request()).await,
        Code::Unavailable,
        &[],
    );
    let other = Fake::new("node-a", &a.home(), &[a.pool_id()]);
    other.description.lock().unwrap().driver_name = "other.example".into();
    let served = other.serve();
    routed.set(&[("node-a", served.address)]).await;
    refused(
        routed.controller().delete_volume(request()).await,
        Code::Unavailable,
        &[],
    );
    assert!(other.timeouts.lock().unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn deadlines_and_disconnects_of_callers_reach_the_agent() {
    let pool = PoolId(Uuid::from_u128(5));
    let fake = Fake::new("node-a", "home", &[pool]);
    let served = fake.serve();
    let routed = TestRouter::new(&[("node-a", served.address)]).await;
    let delete = move |timeout: Option<Duration>| {
        let mut request = Request::new(DeleteVolumeRequest {
            volume_id: format!("{pool}.{}", Uuid::from_u128(6)),
            ..Default::default()
        });
        if let Some(timeout) = timeout {
            request.set_timeout(timeout);
        }
        request
    };
    let mut controller = routed.controller();
    controller.delete_volume(delete(None)).await.unwrap();
    controller
        .delete_volume(delete(Some(Duration::from_secs(90))))
        .await
        .unwrap();
    {
        let seen = fake.timeouts.lock().unwrap();
        assert_eq!(seen[0], None);
        let text = seen[1].as_ref().unwrap();
        let left: u64 = text.trim_end_matches(char::is_alphabetic).parse().unwrap();
        let unit = text.chars().last().unwrap();
        let left = match unit {
            'n' => Duration::from_nanos(left),
            'u' => Duration::from_micros(left),
            'm' => Duration::from_millis(left),
            _ => Duration::from_secs(left),
        };
        assert!(
            left <= Duration::from_secs(90) && left > Duration::from_secs(20),
            "{text}"
        );
    }
    fake.hangs.store(true, Ordering::SeqCst);
    let late = controller
        .delete_volume(delete(Some(Duration::from_millis(300))))
        .await;
    let code = late.unwrap_err().code();
    assert!(
        matches!(code, Code::Cancelled | Code::DeadlineExceeded),
        "{code:?}"
    );
    eventually("the agent's call is given up", async || {
        fake.dropped.load(Ordering::SeqCst)
    })
    .await;

    fake.dropped.store(false, Ordering::SeqCst);
    let call = tokio::spawn(async move { controller.delete_volume(delete(None)).await });
    eventually("the agent receives the call", async || {
        fake.timeouts.lock().unwrap().len() == 4
    })
    .await;
    call.abort();
    eventually("the call is given up", async || {
        fake.dropped.load(Ordering::SeqCst)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_agents_work_goes_on_without_its_caller_and_a_repeat_meets_it() {
    let a = AgentNode::start("node-a", &["default"], None);
    let b = AgentNode::start("node-b", &["default"], None);
    let routed = TestRouter::of(&[&a, &b]).await;
    a.gate.close("allocate");
    let mut request = Request::new(at(create("v"), &[&a.home(), &b.home()]));
    request.set_timeout(Duration::from_secs(2));
    let late = routed
        .controller()
        .create_volume(request)
        .await
        .unwrap_err();
    assert!(
        matches!(late.code(), Code::Cancelled | Code::DeadlineExceeded),
        "{late:?}"
    );
    a.gate.reached(1).await;
    // Wherever a repeat might go, it does not go to the other node, although that node is preferred
    // now.
    let elsewhere = || at(create("v"), &[&b.home(), &a.home()]);
    refused(routed.create(elsewhere()).await, Code::Aborted, &[]);
    a.gate.open();
    eventually("the work is done", async || a.driver.running() == 0).await;
    let created = routed.create(elsewhere()).await.unwrap();
    assert_eq!(home_of(&created), a.home());
    assert_eq!(routed.list(0).await.unwrap(), [created.volume_id]);
    assert_eq!(b.driver.pool_status()[0].volumes, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_breaks_in_the_middle_is_never_final() {
    let mut a = AgentNode::start("node-a", &["default"], None);
    let routed = TestRouter::of(&[&a]).await;
    a.gate.close("allocate");
    let mut controller = routed.controller();
    let request = at(create("v"), &[&a.home()]);
    let call = tokio::spawn(async move { controller.create_volume(request).await });
    a.gate.reached(1).await;
    a.kill();
    refused(call.await.unwrap(), Code::Unavailable, &["node-a"]);
    a.gate.open();
    eventually("the work is done", async || a.driver.running() == 0).await;
    a.revive();
    routed.until("node-a", true).await;
    let created = routed.create(create("v")).await.unwrap();
    assert_eq!(routed.list(0).await.unwrap(), [created.volume_id]);
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_and_forwarded_calls_are_counted() {
    let mut a = AgentNode::start("node-a", &["default"], None);
    let routed = TestRouter::of(&[&a]).await;
    routed.create_on("v", &a).await;
    let text = routed.metrics.render().unwrap();
    for line in [
        "slackwater_agent_up{agent=\"node-a\"} 1.0",
        "slackwater_agent_pools{agent=\"node-a\"} 1.0",
        "slackwater_forwarded_calls_total{agent=\"node-a\",code=\"OK\"} 1",
        "slackwater_router_added_seconds_count 1",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    a.kill();
    refused(routed.list(0).await, Code::Unavailable, &["node-a"]);
    routed.until("node-a", false).await;
    let text = routed.metrics.render().unwrap();
    for line in [
        "slackwater_agent_up{agent=\"node-a\"} 0.0",
        "slackwater_agent_silent_seconds{agent=\"node-a\"}",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
}
