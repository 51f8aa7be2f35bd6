//! The steps of a cut that the router sends to agents of adjacent releases.

use std::sync::atomic::Ordering;

use slackwater::csi::CreateSnapshotRequest;
use slackwater::model::{PoolId, VolumeId};
use uuid::Uuid;

use crate::router::cluster::*;
use crate::router::fake::Fake;

/// A snapshot of a volume in the fake's pool.
async fn cut(routed: &TestRouter, pool: PoolId) {
    let uuid = Uuid::from_u128(2);
    let class = [("consistency".to_string(), "application".to_string())];
    let request = CreateSnapshotRequest {
        name: "s".into(),
        source_volume_id: VolumeId { pool, uuid }.to_string(),
        parameters: class.into(),
        ..Default::default()
    };
    // The fake creates no snapshot at the end, but the volume was cut and committed nevertheless.
    let _ = routed.controller().create_snapshot(request).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_step_ahead_of_the_hooks_goes_only_to_agents_that_announce_it() {
    for ahead in [false, true] {
        let pool = PoolId(Uuid::from_u128(1));
        let fake = Fake::new("node-a", "home", &[pool]);
        fake.ahead.store(ahead, Ordering::SeqCst);
        let served = fake.serve();
        let routed = TestRouter::new(&[("node-a", served.address)]).await;
        cut(&routed, pool).await;
        let mut wanted = vec![
            "begin", "ready", "ahead", "prepare", "freeze", "cut", "written", "keep", "commit",
        ];
        wanted.retain(|step| ahead || *step != "ahead");
        assert_eq!(*fake.steps.lock().unwrap(), wanted);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_steps_of_cuts_have_a_connection_of_their_own_that_no_list_delays() {
    let pool = PoolId(Uuid::from_u128(1));
    let fake = Fake::new("node-a", "home", &[pool]);
    let served = fake.serve();
    let routed = TestRouter::new(&[("node-a", served.address)]).await;
    cut(&routed, pool).await;
    // One connection is made for all later calls.
    cut(&routed, pool).await;
    let [cuts, others] = fake.peers.lock().unwrap().clone();
    assert_eq!(cuts.len(), 1, "{cuts:?}");
    assert!(
        !others.is_empty() && cuts.is_disjoint(&others),
        "{others:?}"
    );
}
