"""Pretrained networks that metrics read: Inception for FID, AlexNet for LPIPS."""
