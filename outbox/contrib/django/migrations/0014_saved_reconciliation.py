from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('outbox', '0013_autovacuum'),
    ]

    operations = [
        migrations.AddField(
            model_name='finding',
            name='step',
            field=models.JSONField(null=True),
        ),
        migrations.CreateModel(
            name='SavedReconciliation',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('output', models.TextField(unique=True)),
                ('run', models.CharField(max_length=63)),
                ('judged_at', models.DateTimeField()),
                ('causes', models.JSONField()),
                ('plan', models.JSONField()),
            ],
            options={
                'db_table': 'outbox_reconciliation',
            },
        ),
    ]
