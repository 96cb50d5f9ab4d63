"""The model and data of faster_rcnn_R_18_FPN_shapes.yaml as a LazyConfig.

Complete: nothing comes from the model zoo. For tools/lazy_train_net.py.
"""

# ruff: noqa: C408 - dict(key=value) is how LazyConfigs are written.
import torch
from detectron2.config import LazyCall as L
from detectron2.data import (
    DatasetMapper,
    build_detection_test_loader,
    build_detection_train_loader,
    get_detection_dataset_dicts,
)
from detectron2.data import transforms as T
from detectron2.evaluation import COCOEvaluator
from detectron2.layers import ShapeSpec
from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
from detectron2.modeling.backbone import FPN, BasicStem, ResNet
from detectron2.modeling.backbone.fpn import LastLevelMaxPool
from detectron2.modeling.box_regression import Box2BoxTransform
from detectron2.modeling.matcher import Matcher
from detectron2.modeling.meta_arch import GeneralizedRCNN
from detectron2.modeling.poolers import ROIPooler
from detectron2.modeling.proposal_generator import RPN, StandardRPNHead
from detectron2.modeling.roi_heads import (
    FastRCNNConvFCHead,
    FastRCNNOutputLayers,
    StandardROIHeads,
)
from detectron2.solver import WarmupParamScheduler
from detectron2.solver.build import get_default_optimizer_params
from fvcore.common.param_scheduler import CosineParamScheduler

import d2_static_sampler.data  # noqa: F401  registers shapes_train and shapes_val

INPUT_FORMAT = "BGR"
LEVELS = ["p2", "p3", "p4", "p5"]

# The keys of MODEL.SAMPLER in lower case; those that are left out have their defaults.
sampler = dict(impl="static", select="auto", seed=-1)

model = L(GeneralizedRCNN)(
    backbone=L(FPN)(
        bottom_up=L(ResNet)(
            stem=L(BasicStem)(in_channels=3, out_channels=64, norm="BN"),
            stages=L(ResNet.make_default_stages)(depth=18, norm="BN"),
            out_features=["res2", "res3", "res4", "res5"],
        ),
        in_features="${.bottom_up.out_features}",
        out_channels=64,
        norm="BN",
        top_block=L(LastLevelMaxPool)(),
    ),
    proposal_generator=L(RPN)(
        in_features=LEVELS,
        head=L(StandardRPNHead)(in_channels=64, num_anchors=3),
        anchor_generator=L(DefaultAnchorGenerator)(
            sizes=[[16], [32], [64], [128]],
            aspect_ratios=[0.5, 1.0, 2.0],
            strides=[4, 8, 16, 32],
        ),
        anchor_matcher=L(Matcher)(
            thresholds=[0.3, 0.7], labels=[0, -1, 1], allow_low_quality_matches=True
        ),
        box2box_transform=L(Box2BoxTransform)(weights=[1.0, 1.0, 1.0, 1.0]),
        batch_size_per_image=64,
        positive_fraction=0.5,
        pre_nms_topk=(300, 300),
        post_nms_topk=(200, 100),
        nms_thresh=0.7,
    ),
    roi_heads=L(StandardROIHeads)(
        num_classes=3,
        batch_size_per_image=64,
        # Few proposals are positive at first: a larger share of them trains the box head sooner.
        positive_fraction=0.5,
        proposal_matcher=L(Matcher)(
            thresholds=[0.5], labels=[0, 1], allow_low_quality_matches=False
        ),
        box_in_features=LEVELS,
        box_pooler=L(ROIPooler)(
            output_size=7,
            scales=(1 / 4, 1 / 8, 1 / 16, 1 / 32),
            sampling_ratio=2,
            pooler_type="ROIAlignV2",
        ),
        box_head=L(FastRCNNConvFCHead)(
            input_shape=L(ShapeSpec)(channels=64, height=7, width=7),
            conv_dims=[],
            fc_dims=[256, 256],
        ),
        box_predictor=L(FastRCNNOutputLayers)(
            input_shape=L(ShapeSpec)(channels=256),
            box2box_transform=L(Box2BoxTransform)(weights=[10.0, 10.0, 5.0, 5.0]),
            num_classes="${..num_classes}",
            test_score_thresh=0.05,
        ),
    ),
    pixel_mean=[127.5, 127.5, 127.5],
    pixel_std=[58.0, 58.0, 58.0],
    input_format=INPUT_FORMAT,
)

dataloader = dict(
    train=L(build_detection_train_loader)(
        # The images without any object are part of the data.
        dataset=L(get_detection_dataset_dicts)(names="shapes_train", filter_empty=False),
        mapper=L(DatasetMapper)(
            is_train=True,
            augmentations=[
                L(T.ResizeShortestEdge)(
                    short_edge_length=[160], sample_style="choice", max_size=160
                ),
                L(T.RandomFlip)(),
            ],
            image_format=INPUT_FORMAT,
        ),
        total_batch_size=4,
        aspect_ratio_grouping=False,
        num_workers=0,
    ),
    test=L(build_detection_test_loader)(
        dataset=L(get_detection_dataset_dicts)(names="shapes_val", filter_empty=False),
        mapper=L(DatasetMapper)(
            is_train=False,
            augmentations=[L(T.ResizeShortestEdge)(short_edge_length=160, max_size=160)],
            image_format=INPUT_FORMAT,
        ),
        num_workers=0,
    ),
    evaluator=L(COCOEvaluator)(
        dataset_name="${..test.dataset.names}", output_dir="${train.output_dir}/inference"
    ),
)

# LazyConfig has no key for gradient clipping, which the YAML's SGD needs; AdamW does without.
optimizer = L(torch.optim.AdamW)(
    params=L(get_default_optimizer_params)(weight_decay_norm=0.0),
    lr=1e-3,
    weight_decay=1e-4,
)
lr_multiplier = L(WarmupParamScheduler)(
    scheduler=L(CosineParamScheduler)(start_value=1.0, end_value=0.0),
    warmup_factor=0.001,
    warmup_length=1 / 6,
)

train = dict(
    output_dir="output/lazy_shapes",
    init_checkpoint="",
    max_iter=300,
    seed=42,
    device="cpu",
    amp=dict(enabled=False),
    ddp=dict(broadcast_buffers=False, find_unused_parameters=False, fp16_compression=False),
    checkpointer=dict(period=100, max_to_keep=100),
    eval_period=0,
    log_period=20,
)
