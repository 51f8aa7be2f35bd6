//! On a pool that stays full, existing volumes can still be unstaged and deleted.

use slackwater::csi::*;

use crate::service::harness::*;

#[tokio::test]
async fn volumes_can_be_unstaged_staged_and_deleted_on_a_full_pool() {
    for capability in [mount(), block()] {
        let node = Node::start().await;
        let request = CreateVolumeRequest {
            volume_capabilities: vec![capability.clone()],
            ..create("v")
        };
        let created = node.controller.clone().create_volume(request).await;
        let id = created.unwrap().into_inner().volume.unwrap().volume_id;
        let stage = || NodeStageVolumeRequest {
            volume_capability: Some(capability.clone()),
            ..stage(&id)
        };
        let mut client = node.node.clone();
        client.node_stage_volume(stage()).await.unwrap();
        node.host.keep_full(true);
        let publish = NodePublishVolumeRequest {
            volume_capability: Some(capability.clone()),
            ..publish(&id, TARGET)
        };
        client.node_publish_volume(publish).await.unwrap();
        let refused = node
            .controller
            .clone()
            .delete_volume(delete(&id))
            .await
            .unwrap_err();
        assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
        let unpublish = NodeUnpublishVolumeRequest {
            volume_id: id.clone(),
            target_path: TARGET.into(),
        };
        client.node_unpublish_volume(unpublish).await.unwrap();
        node.unstage(&id).await;
        // As after a reboot.
        client.node_stage_volume(stage()).await.unwrap();
        let refused = node
            .controller
            .clone()
            .delete_volume(delete(&id))
            .await
            .unwrap_err();
        assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
        node.unstage(&id).await;
        node.delete(&id).await;
        node.stop().await;
    }
}
